"""Models: files, weights, tokenizers, and the programs that compute them."""
