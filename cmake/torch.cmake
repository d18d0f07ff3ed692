# The torch ops (csrc/torch): one library for every Python and every torch from 2.10 on, as it uses nothing but torch's
# stable C interface. It needs the headers of any torch from 2.10 on, found beside this Python, and none at run time:
# it opens no engine's library itself, Python names it.
execute_process(COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tools/torch_for_cmake.py
  RESULT_VARIABLE am_torch_missing OUTPUT_VARIABLE am_torch_folder ERROR_VARIABLE am_torch_why
  OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_STRIP_TRAILING_WHITESPACE)
set(ASCEND_MOE_TORCH AUTO CACHE STRING "Build the torch ops: AUTO (where torch is), ON or OFF")
if(NOT am_torch_missing EQUAL 0 AND ASCEND_MOE_TORCH STREQUAL "AUTO")
  message(STATUS "Torch ops: not built. ${am_torch_why}; then install with --no-build-isolation")
  return()
elseif(NOT ASCEND_MOE_TORCH)
  return()
elseif(NOT am_torch_missing EQUAL 0)
  message(FATAL_ERROR "ASCEND_MOE_TORCH is ON, but ${am_torch_why}")
endif()
message(STATUS "Torch ops: headers of ${am_torch_folder}")

file(GLOB am_torch_sources CONFIGURE_DEPENDS csrc/torch/*.cpp)
add_library(ascend_moe_torch SHARED ${am_torch_sources})
set_target_properties(ascend_moe_torch PROPERTIES SKIP_BUILD_RPATH ON)  # torch is in the process, found by its name
target_compile_options(ascend_moe_torch PRIVATE -Wall -Wextra -Werror=return-type)
# 2.10: nothing newer is used, whatever torch the headers are of.
target_compile_definitions(ascend_moe_torch PRIVATE TORCH_TARGET_VERSION=0x020a000000000000ULL)
target_include_directories(ascend_moe_torch PRIVATE op_kernel op_host csrc)
target_include_directories(ascend_moe_torch SYSTEM PRIVATE ${am_torch_folder}/include)
target_link_options(ascend_moe_torch PRIVATE -Wl,-z,noexecstack -Wl,--allow-shlib-undefined)
target_link_libraries(ascend_moe_torch PRIVATE
  ${am_torch_folder}/lib/libtorch_cpu.so Threads::Threads ${CMAKE_DL_LIBS})
if(ASCEND_MOE_SANITIZE)
  target_compile_options(ascend_moe_torch PRIVATE -fsanitize=${ASCEND_MOE_SANITIZE} -fno-omit-frame-pointer)
  target_link_options(ascend_moe_torch PRIVATE -fsanitize=${ASCEND_MOE_SANITIZE})
endif()
install(TARGETS ascend_moe_torch LIBRARY DESTINATION ascend_moe/lib COMPONENT lib)
