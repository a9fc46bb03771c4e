// The operators of namespace millrace on CPU. One translation unit: the torch headers dominate the build.
#include <torch/library.h>

#include "attention.h"
#include "linear.h"
#include "norms.h"
#include "pages.h"

TORCH_LIBRARY(millrace, library) {
  library.def("rms_norm(Tensor(a!) out, Tensor x, Tensor weight, float eps) -> ()");
  library.def("add_rms_norm(Tensor(a!) out, Tensor x, Tensor(b!) residual, Tensor weight, float eps) -> ()");
  library.def("silu_mul(Tensor(a!) out, Tensor gate_up) -> ()");
  library.def("store(Tensor key, Tensor value, Tensor cache_rows, Tensor(a!) keys, Tensor(b!) values) -> ()");
  library.def(
      "rope_store(Tensor(a!) qkv, Tensor rope, Tensor positions, Tensor cache_rows, Tensor(b!) keys, "
      "Tensor(c!) values, int num_heads) -> ()");
  library.def(
      "attend(Tensor(a!) out, Tensor queries, Tensor keys, Tensor values, Tensor tables, Tensor starts, "
      "Tensor contexts, float scale, int window, float softcap) -> ()");
  library.def("pack_linear(Tensor weight) -> Tensor");
  library.def("packed_linear(Tensor(a!) y, Tensor x, Tensor packed, Tensor bias) -> ()");
}

TORCH_LIBRARY_IMPL(millrace, CPU, library) {
  library.impl("rms_norm", millrace::rms_norm);
  library.impl("add_rms_norm", millrace::add_rms_norm);
  library.impl("silu_mul", millrace::silu_mul);
  library.impl("store", millrace::store);
  library.impl("rope_store", millrace::rope_store);
  library.impl("attend", millrace::attend);
  library.impl("pack_linear", millrace::pack_linear);
  library.impl("packed_linear", millrace::packed_linear);
}
