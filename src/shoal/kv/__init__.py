"""The KV cache: a pool of fixed-size blocks and a block table for each request."""
