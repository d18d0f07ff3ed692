// libge_runner.so, libgraph.so, libacl_tdt_channel.so: torch_npu names them but uses nothing of them.
extern "C" __attribute__((visibility("default"))) const char* vnpu_library(void);
const char* vnpu_library(void) { return "virtual NPU of ascend_moe: nothing is in here"; }
