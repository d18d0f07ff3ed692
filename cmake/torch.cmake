# The compiled kernels of the torch ops (csrc/torch), for the torch that is installed beside this Python: pip needs
# --no-build-isolation. Without them, or with another torch, the ops' Python kernels run. They open no engine's
# library themselves: Python hands them its functions.
execute_process(COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tools/torch_for_cmake.py
  RESULT_VARIABLE am_torch_missing OUTPUT_VARIABLE am_torch ERROR_VARIABLE am_torch_why
  OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_STRIP_TRAILING_WHITESPACE)
set(ASCEND_MOE_TORCH AUTO CACHE STRING "Build the compiled kernels of the torch ops: AUTO, ON or OFF")
if(NOT am_torch_missing EQUAL 0 AND ASCEND_MOE_TORCH STREQUAL "AUTO")
  message(STATUS "Compiled torch ops: not built. ${am_torch_why}; then install with --no-build-isolation")
  return()
elseif(NOT ASCEND_MOE_TORCH OR (ASCEND_MOE_SANITIZE AND ASCEND_MOE_TORCH STREQUAL "AUTO"))
  return()  # torch itself is not built with sanitizers: the package's own are used
elseif(NOT am_torch_missing EQUAL 0)
  message(FATAL_ERROR "ASCEND_MOE_TORCH is ON, but ${am_torch_why}")
endif()
list(GET am_torch 0 am_torch_version)
list(GET am_torch 1 am_torch_folder)
list(GET am_torch 2 am_torch_abi)
list(GET am_torch 3 am_torch_c10d)
list(GET am_torch 4 am_python_headers)
list(GET am_torch 5 am_python_suffix)
message(STATUS "Compiled torch ops: torch ${am_torch_version} in ${am_torch_folder}")

# What every library against torch is built and installed with.
function(am_of_torch name)
  target_compile_options(${name} PRIVATE -Wall -Wextra -Werror=return-type)
  target_compile_definitions(${name} PRIVATE _GLIBCXX_USE_CXX11_ABI=${am_torch_abi})
  target_include_directories(${name} SYSTEM PRIVATE
    ${am_torch_folder}/include ${am_torch_folder}/include/torch/csrc/api/include)
  target_link_options(${name} PRIVATE -Wl,-z,noexecstack -Wl,--allow-shlib-undefined)
  if(ASCEND_MOE_SANITIZE)
    target_compile_options(${name} PRIVATE -fsanitize=${ASCEND_MOE_SANITIZE} -fno-omit-frame-pointer)
    target_link_options(${name} PRIVATE -fsanitize=${ASCEND_MOE_SANITIZE})
  endif()
  install(TARGETS ${name} LIBRARY DESTINATION ascend_moe/lib COMPONENT lib)
endfunction()

file(GLOB am_torch_sources CONFIGURE_DEPENDS csrc/torch/*.cpp)
add_library(ascend_moe_torch SHARED ${am_torch_sources})
set_target_properties(ascend_moe_torch PROPERTIES
  OUTPUT_NAME ascend_moe_torch-${am_torch_version}
  SKIP_BUILD_RPATH ON)  # torch is in the process already, found by its name
am_of_torch(ascend_moe_torch)
if(am_torch_c10d AND EXISTS ${am_torch_folder}/include/torch/csrc/distributed/c10d/GroupRegistry.hpp)
  target_compile_definitions(ascend_moe_torch PRIVATE ASCEND_MOE_C10D=1)
endif()
target_link_libraries(ascend_moe_torch PRIVATE
  ${am_torch_folder}/lib/libc10.so ${am_torch_folder}/lib/libtorch_cpu.so Threads::Threads ${CMAKE_DL_LIBS})

# Calls from Python straight to those kernels: an extension module of this Python and this torch. Without it calls
# take torch's way.
if(NOT IS_DIRECTORY ${am_python_headers} OR NOT EXISTS ${am_torch_folder}/lib/libtorch_python.so)
  message(STATUS "Calls past torch's binding: not built, no Python.h or no libtorch_python.so")
  return()
endif()
file(GLOB am_calls_sources CONFIGURE_DEPENDS csrc/torch/python/*.cpp)
add_library(ascend_moe_calls MODULE ${am_calls_sources})
set_target_properties(ascend_moe_calls PROPERTIES
  PREFIX "" SUFFIX ${am_python_suffix} OUTPUT_NAME ascend_moe_calls-${am_torch_version}
  BUILD_RPATH "$ORIGIN" INSTALL_RPATH "$ORIGIN")
am_of_torch(ascend_moe_calls)
target_include_directories(ascend_moe_calls SYSTEM PRIVATE ${am_python_headers})
target_link_libraries(ascend_moe_calls PRIVATE
  ascend_moe_torch ${am_torch_folder}/lib/libtorch_python.so)
