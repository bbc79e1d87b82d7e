// What the files of the Python module share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <initializer_list>
#include <span>
#include <utility>
#include <vector>

#include "sampler.h"

namespace shoal {

template <typename T>
using Array =
    nanobind::ndarray<const T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using Ids = Array<int32_t>;

template <typename T>
std::span<const T> as_span(const Array<T>& array) {
  return {array.data(), array.size()};
}

template <typename T>
std::vector<T> as_vector(const Array<T>& array) {
  return {array.data(), array.data() + array.size()};
}

// Gives the memory of a vector to a NumPy array.
template <typename T>
nanobind::ndarray<nanobind::numpy, T> to_numpy(std::vector<T> values,
                                               std::initializer_list<std::size_t> shape) {
  auto* owned = new std::vector<T>(std::move(values));
  nanobind::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nanobind::ndarray<nanobind::numpy, T>(owned->data(), shape, owner);
}

// (status, token_ids, logprobs, top_ids, top_logprobs); the last two [rows, largest num_top].
nanobind::tuple to_arrays(const std::vector<RowResult>& results,
                          std::span<const int32_t> num_top);

// The submodule by which tests call single kernels.
void bind_kernels(nanobind::module_& module);

}  // namespace shoal
