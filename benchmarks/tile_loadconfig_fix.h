// Makes llama.cpp's AMX kernels work when GCC 12 compiles them; force-included by setup_peers.py.
//
// In GCC 12, _tile_loadconfig tells the compiler that it reads eight bytes of the configuration.
// The stores to the other 56 are then dropped as dead, and the first tile instruction traps. The
// barrier before the call keeps them. Newer compilers lose nothing by it.
#pragma once
#if defined(__AMX_TILE__) && defined(__cplusplus)
#include <immintrin.h>
#define _tile_loadconfig(config)                             \
  do {                                                       \
    const void* tile_config = (config);                      \
    __asm__ volatile("" : : "r"(tile_config) : "memory");    \
    (_tile_loadconfig)(tile_config);                         \
  } while (0)
#endif
