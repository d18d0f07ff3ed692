# op_host, built without CANN, and the C++ API that runs it (vnpu/cann_standin/standin.h).
# Link its objects: target_link_libraries(<library> PRIVATE opp_standin). An archive would drop the definitions,
# which nobody calls by name.
set(am_standin ${CMAKE_CURRENT_SOURCE_DIR}/vnpu/cann_standin)
# CANN's headers that standin.h stands for; tests/host reads this list, too.
set(am_cann_headers
  base/err_msg.h
  exe_graph/runtime/infer_datatype_context.h
  exe_graph/runtime/infer_shape_context.h
  exe_graph/runtime/tiling_context.h
  platform/platform_infos_def.h
  register/op_def_registry.h
  tiling/hccl/hccl_tiling.h
  tiling/platform/platform_ascendc.h)
foreach(name ${am_cann_headers})
  file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/cann_standin/${name} CONTENT "#include \"standin.h\"\n")
endforeach()
file(GLOB am_op_host CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/op_host/*.cpp)
add_library(opp_standin OBJECT ${am_standin}/standin.cpp ${am_op_host})
target_compile_features(opp_standin PUBLIC cxx_std_17)
target_include_directories(
  opp_standin PUBLIC ${am_standin} ${CMAKE_CURRENT_BINARY_DIR}/cann_standin ${CMAKE_CURRENT_SOURCE_DIR}/op_host
                     ${CMAKE_CURRENT_SOURCE_DIR}/op_kernel)
set_target_properties(
  opp_standin PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden
                         VISIBILITY_INLINES_HIDDEN ON)
