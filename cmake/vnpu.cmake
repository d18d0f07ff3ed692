# The virtual NPU: our own libraries under the names that torch_npu loads, over host memory. Plain C++ and libc; no
# torch, no CANN. They go to ascend_moe/lib/vnpu, where only `ascend-moe vnpu` puts them on a library path.
option(ASCEND_MOE_VNPU "Build the virtual NPU's libraries" ON)
if(NOT ASCEND_MOE_VNPU)
  return()
endif()

set(vnpu_src ${CMAKE_CURRENT_SOURCE_DIR}/vnpu)
add_custom_target(vnpu_libraries)  # all of them

# vnpu_library(NAME SOURCES...) builds lib<NAME>.so; what the sources do not mark as exported stays inside.
# vnpu_subfolder, set by the caller: where below lib/vnpu it goes.
function(vnpu_library name)
  add_library(vnpu_${name} SHARED ${ARGN})
  add_dependencies(vnpu_libraries vnpu_${name})
  set_target_properties(vnpu_${name} PROPERTIES
    OUTPUT_NAME ${name}
    LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/vnpu${vnpu_subfolder}
    BUILD_RPATH_USE_ORIGIN ON
    BUILD_RPATH "$ORIGIN;$ORIGIN/..;$ORIGIN/../../.."
    INSTALL_RPATH "$ORIGIN:$ORIGIN/..:$ORIGIN/../../..")
  target_include_directories(vnpu_${name} PRIVATE ${vnpu_src} ${CMAKE_CURRENT_SOURCE_DIR}/op_host)
  target_link_libraries(vnpu_${name} PRIVATE am_options ${CMAKE_DL_LIBS})
  target_link_options(vnpu_${name} PRIVATE -Wl,-z,noexecstack)
  if(NOT ASCEND_MOE_SANITIZE)
    target_link_options(vnpu_${name} PRIVATE -Wl,--no-undefined)
  endif()
  install(TARGETS vnpu_${name} LIBRARY DESTINATION ascend_moe/lib/vnpu${vnpu_subfolder} COMPONENT lib)
endfunction()

file(GLOB vnpu_acl CONFIGURE_DEPENDS ${vnpu_src}/acl/*.cpp)
vnpu_library(ascendcl ${vnpu_acl})

vnpu_library(acl_op_compiler ${vnpu_src}/acl/stubs.cpp)
target_compile_definitions(vnpu_acl_op_compiler PRIVATE VNPU_OP_COMPILER)
target_link_libraries(vnpu_acl_op_compiler PRIVATE vnpu_ascendcl)

# torch_npu names these libraries and uses nothing of them.
set(vnpu_empty ${CMAKE_CURRENT_BINARY_DIR}/vnpu_empty_library.cpp)
file(CONFIGURE OUTPUT ${vnpu_empty} CONTENT
  "extern \"C\" __attribute__((visibility(\"default\"))) const char* vnpu_library() {
    return \"virtual NPU of ascend_moe: nothing is in here\";
}
")
foreach(name ge_runner graph acl_tdt_channel)
  vnpu_library(${name} ${vnpu_empty})
endforeach()

file(GLOB vnpu_hccl CONFIGURE_DEPENDS ${vnpu_src}/hccl/*.cpp)
if(vnpu_hccl)
  vnpu_library(hccl ${vnpu_hccl})
  target_link_libraries(vnpu_hccl PRIVATE vnpu_ascendcl)
endif()

# Built-in operators (aclnn*, aclCreateTensor...).
file(GLOB vnpu_opapi CONFIGURE_DEPENDS ${vnpu_src}/opapi/*.cpp)
if(vnpu_opapi)
  vnpu_library(opapi ${vnpu_opapi})
  target_link_libraries(vnpu_opapi PRIVATE vnpu_ascendcl)
endif()

# Our own operators: the aclnn entry points over the twin. torch_npu looks for them in an opp package's folders only
# ($ASCEND_CUSTOM_OPP_PATH).
set(vnpu_subfolder /opp/op_api/lib)
file(GLOB vnpu_cust_opapi CONFIGURE_DEPENDS ${vnpu_src}/cust_opapi/*.cpp)
if(vnpu_cust_opapi)
  # The twin itself is opened at run time: the same library file that Python opens.
  include(${CMAKE_CURRENT_LIST_DIR}/opp_standin.cmake)
  set(am_op_api ${CMAKE_CURRENT_BINARY_DIR}/op_api)
  set(am_description ${CMAKE_CURRENT_SOURCE_DIR}/tools/op_description.py)
  add_custom_command(
    OUTPUT ${am_op_api}/aclnn_ascend_moe.cpp ${am_op_api}/aclnn_ascend_moe.h
    COMMAND ${Python3_EXECUTABLE} ${am_description} aclnn ${am_op_api}
    DEPENDS ${am_description} op_host/rules/op.h op_host/op_api/aclnn_ascend_moe.h.in
    COMMENT "Making the aclnn entry points"
    VERBATIM)
  vnpu_library(cust_opapi ${vnpu_cust_opapi} ${am_op_api}/aclnn_ascend_moe.cpp)
  target_include_directories(vnpu_cust_opapi PRIVATE ${am_op_api} ${CMAKE_CURRENT_SOURCE_DIR}/op_host/op_api)
  target_link_libraries(vnpu_cust_opapi PRIVATE vnpu_ascendcl opp_standin)
  foreach(name hccl opapi)
    if(TARGET vnpu_${name})
      target_link_libraries(vnpu_cust_opapi PRIVATE vnpu_${name})
    endif()
  endforeach()
endif()
