# The torch_npu adapter: one compiler call against the torch and torch_npu that are installed beside this Python,
# so pip needs --no-build-isolation. Without it the adapter is compiled on the first op with NPU tensors.
set(am_npu_build ${CMAKE_CURRENT_SOURCE_DIR}/ascend_moe/ops/npu_adapter_build.py)
execute_process(COMMAND ${Python3_EXECUTABLE} ${am_npu_build} --check
  RESULT_VARIABLE am_npu_missing OUTPUT_VARIABLE am_npu_found ERROR_VARIABLE am_npu_why
  OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_STRIP_TRAILING_WHITESPACE)
set(am_npu_default OFF)
if(DEFINED ENV{ASCEND_HOME_PATH} AND am_npu_missing EQUAL 0)
  set(am_npu_default ON)
elseif(DEFINED ENV{ASCEND_HOME_PATH})
  message(STATUS "torch_npu adapter: not built. ${am_npu_why}; then install with --no-build-isolation")
endif()
option(ASCEND_MOE_NPU "Build the torch_npu adapter" ${am_npu_default})
if(NOT ASCEND_MOE_NPU)
  return()
endif()
if(NOT am_npu_missing EQUAL 0)
  message(FATAL_ERROR "ASCEND_MOE_NPU is ON, but ${am_npu_why}")
endif()
message(STATUS "torch_npu adapter: torch, torch_npu, compiler ${am_npu_found}")

file(GLOB am_npu CONFIGURE_DEPENDS csrc/npu/*)
set(am_npu_library ${CMAKE_CURRENT_BINARY_DIR}/libascend_moe_npu.so)
add_custom_command(
  OUTPUT ${am_npu_library} ${am_npu_library}.key
  COMMAND ${Python3_EXECUTABLE} ${am_npu_build} ${CMAKE_CURRENT_SOURCE_DIR} ${am_npu_library}
  DEPENDS ${am_npu} ${am_npu_build}
  COMMENT "Compiling the torch_npu adapter"
  VERBATIM)
add_custom_target(ascend_moe_npu ALL DEPENDS ${am_npu_library})
install(FILES ${am_npu_library} ${am_npu_library}.key DESTINATION ascend_moe/lib COMPONENT lib)
