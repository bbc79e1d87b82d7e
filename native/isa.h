// The instruction sets that the kernels are compiled for; one is chosen once, at run time.
#pragma once

namespace shoal {

// Ordered: each set includes those before it. kPortable and kAvx2 give the same bits; kAvx512, which attends
// in int8, and kAmx, which multiplies in bf16 too, have bits of their own.
enum class Isa {
  kPortable,  // plain C++
  kAvx2,      // AVX2, FMA, F16C
  kAvx512,    // AVX-512 F, BW, DQ, VL and VNNI
  kAmx,       // kAvx512, AVX-512 BF16 and FP16, and AMX bf16 and int8 tiles
};

// The best set that this processor and operating system support. Asks the kernel for the AMX tile
// state once when the processor has it.
Isa detect_isa();

// detect_isa(), or the set that the environment variable SHOAL_ISA names: "portable", "avx2",
// "avx512" or "amx". Throws std::invalid_argument for another name or a set that is not supported here.
Isa isa_from_environment();

// The set of that name. Throws as isa_from_environment does.
Isa isa_from_name(const char* name);

const char* isa_name(Isa isa);

}  // namespace shoal
