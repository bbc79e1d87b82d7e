#include "kernels.h"

namespace shoal {

namespace isa_portable {
extern const Kernels kernels;
}
#if defined(__x86_64__)
namespace isa_avx2 {
extern const Kernels kernels;
}
namespace isa_avx512 {
extern const Kernels kernels;
}
namespace isa_amx {
extern const Kernels kernels;
}
#endif

const Kernels& kernels_for(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAmx) return isa_amx::kernels;
  if (isa == Isa::kAvx512) return isa_avx512::kernels;
  if (isa == Isa::kAvx2) return isa_avx2::kernels;
#else
  (void)isa;
#endif
  return isa_portable::kernels;
}

}  // namespace shoal
