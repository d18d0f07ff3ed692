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
# The linker needs the library's name alone. An empty one has it, so that a wheel for another processor can be built
# beside this one's torch.
set(am_torch_stub ${CMAKE_CURRENT_BINARY_DIR}/torch_stub)
file(CONFIGURE OUTPUT ${am_torch_stub}/empty.cpp CONTENT "")
add_library(torch_stub SHARED ${am_torch_stub}/empty.cpp)
set_target_properties(torch_stub PROPERTIES OUTPUT_NAME torch_cpu LIBRARY_OUTPUT_DIRECTORY ${am_torch_stub})
target_link_options(ascend_moe_torch PRIVATE -Wl,-z,noexecstack -Wl,--no-as-needed -Wl,--unresolved-symbols=ignore-all)
target_link_libraries(ascend_moe_torch PRIVATE torch_stub Threads::Threads ${CMAKE_DL_LIBS})
if(ASCEND_MOE_SANITIZE)
  target_compile_options(ascend_moe_torch PRIVATE -fsanitize=${ASCEND_MOE_SANITIZE} -fno-omit-frame-pointer)
  target_link_options(ascend_moe_torch PRIVATE -fsanitize=${ASCEND_MOE_SANITIZE})
endif()
install(TARGETS ascend_moe_torch LIBRARY DESTINATION ascend_moe/lib COMPONENT lib)
