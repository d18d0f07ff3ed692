# op_host, built without CANN, and the C++ API that runs it (vnpu/cann_standin/standin.h).
# Link its objects: target_link_libraries(<library> PRIVATE opp_standin). An archive would drop the definitions,
# which nobody calls by name.
set(am_standin ${CMAKE_CURRENT_SOURCE_DIR}/vnpu/cann_standin)
file(GLOB am_op_host CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/op_host/*.cpp)
add_library(opp_standin OBJECT ${am_standin}/standin.cpp ${am_op_host})
target_compile_features(opp_standin PUBLIC cxx_std_17)
target_include_directories(
  opp_standin PUBLIC ${am_standin} ${am_standin}/include ${CMAKE_CURRENT_SOURCE_DIR}/op_host
                     ${CMAKE_CURRENT_SOURCE_DIR}/op_kernel)
set_target_properties(
  opp_standin PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden
                         VISIBILITY_INLINES_HIDDEN ON)
