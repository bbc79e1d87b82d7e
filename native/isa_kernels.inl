// The body of isa_<set>.cpp: all kernel families, compiled for one instruction set.
#include "attention_kernels.h"
#include "attention_vnni_kernels.h"
#include "kernels.h"
#include "linear_kernels.h"
#if defined(__AMX_BF16__)
#include "attention_amx_kernels.h"
#include "linear_amx_kernels.h"
#endif
#include "row_kernels.h"
#include "sampling_kernels.h"

namespace shoal::SHOAL_ISA_NAMESPACE {

extern const Kernels kernels;
const Kernels kernels = {
    .linear = &kLinearKernels,
#if defined(__AMX_BF16__)
    .tiles = &kTileKernels,
#else
    .tiles = nullptr,
#endif
#if defined(__AVX512VNNI__)
    .kv_type = KvType::kInt8,
#else
    .kv_type = KvType::kHalf,
#endif
    .rms_norm = rms_norm,
    .rope = rope,
    .gated_silu = gated_silu,
    .add = add,
#if defined(__AVX512VNNI__)
    .write_kv = write_kv_int8,
    .prepare_queries = prepare_queries,
#else
    .write_kv = write_kv,
    .prepare_queries = nullptr,
#endif
#if defined(__AMX_BF16__)
    .attend_chunk = attend_chunk_int8<TileAttention>,
#elif defined(__AVX512VNNI__)
    .attend_chunk = attend_chunk_int8<VectorAttention>,
#else
    .attend_chunk = attend_chunk,
#endif
    .merge_states = merge_states,
    .finish_state = finish_state,
    .summarize = summarize,
    .top_n = top_n,
    .exp_weights = exp_weights,
    .collect = collect,
};

}  // namespace shoal::SHOAL_ISA_NAMESPACE
