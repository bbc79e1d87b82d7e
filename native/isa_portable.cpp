#include "isa_kernels.inl"
