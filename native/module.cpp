// The Python module shoal._native.
#include <nanobind/nanobind.h>

#include "thread_pool.h"

namespace nb = nanobind;

NB_MODULE(_native, m) { m.doc() = "The native runtime of Shoal."; }
