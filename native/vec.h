// Vec: sixteen float lanes, the unit of all fp32 arithmetic of the kernels.
//
// Each instruction set implements the same operations on the same sixteen lanes, with one rounding
// for a fused multiply-add and a fixed tree for the sum over lanes, so that a kernel written once on
// Vec gives the same bits everywhere. A file that includes this is compiled once for each instruction
// set; everything lies in a namespace of its own so that the linker never mixes them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#define SHOAL_ISA_NAMESPACE isa_avx512
#elif defined(__AVX2__)
#include <immintrin.h>
#define SHOAL_ISA_NAMESPACE isa_avx2
#else
#define SHOAL_ISA_NAMESPACE isa_portable
#endif
