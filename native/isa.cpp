#include "isa.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace shoal {

namespace {

#if defined(__x86_64__)

bool amx_usable() {
#if defined(__linux__)
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  const bool avx512_vbmi = (ecx >> 1) & 1;
  const bool amx_bf16 = (edx >> 22) & 1;
  const bool avx512_fp16 = (edx >> 23) & 1;
  const bool amx_tile = (edx >> 24) & 1;
  const bool amx_int8 = (edx >> 25) & 1;
  if (!avx512_vbmi || !amx_bf16 || !avx512_fp16 || !amx_tile || !amx_int8) return false;
  if (!__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx)) return false;
  const bool avx512_bf16 = (eax >> 5) & 1;
  if (!avx512_bf16) return false;
  // Tile state is off until the process asks for it (Linux 5.16, Documentation/arch/x86/xstate).
  constexpr long kRequestPermission = 0x1023;
  constexpr long kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

Isa probe() {
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
  if (avx512) return amx_usable() ? Isa::kAmx : Isa::kAvx512;
  return avx2 ? Isa::kAvx2 : Isa::kPortable;
}

#else

Isa probe() { return Isa::kPortable; }

#endif

}  // namespace

Isa detect_isa() {
  static const Isa isa = probe();
  return isa;
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kPortable: return "portable";
    case Isa::kAvx2: return "avx2";
    case Isa::kAvx512: return "avx512";
    case Isa::kAmx: return "amx";
  }
  return "unknown";
}

Isa isa_from_environment() {
  const char* name = std::getenv("SHOAL_ISA");
  return name == nullptr || *name == '\0' ? detect_isa() : isa_from_name(name);
}

Isa isa_from_name(const char* name) {
  for (const Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512, Isa::kAmx}) {
    if (std::string(name) != isa_name(isa)) continue;
    if (isa > detect_isa()) {
      throw std::invalid_argument(std::string("instruction set ") + name +
                                  ": this machine supports no more than " +
                                  isa_name(detect_isa()));
    }
    return isa;
  }
  throw std::invalid_argument(std::string("instruction set ") + name +
                              ": expected portable, avx2, avx512 or amx");
}

}  // namespace shoal
