# libevenstep for C programs: shared library, headers, pkg-config file, CMake package. Not part of the wheel.
if(SKBUILD)
  return()
endif()
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
file(WRITE ${PROJECT_BINARY_DIR}/empty.c "typedef int evenstep_library;\n")
add_library(evenstep_library SHARED ${PROJECT_BINARY_DIR}/empty.c)
add_library(evenstep::evenstep ALIAS evenstep_library)
target_link_libraries(evenstep_library PRIVATE -Wl,--whole-archive evenstep_core -Wl,--no-whole-archive)
# It stays where it is after dlclose: its threads may run, and what it does at a thread's end is called by others' threads.
target_link_options(evenstep_library PRIVATE LINKER:-z,nodelete)
target_include_directories(evenstep_library INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                                                      $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
# SOVERSION rises where a program that was compiled before would go wrong: another function, or another struct without `size`.
set_target_properties(evenstep_library PROPERTIES OUTPUT_NAME evenstep EXPORT_NAME evenstep VERSION ${PROJECT_VERSION} SOVERSION 0)

# The files say where things are from where they lie themselves, so that an installation can be moved; a folder that was given as
# an absolute path stays where it is.
if(IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}")
  set(EVENSTEP_PC_PREFIX "${CMAKE_INSTALL_PREFIX}")
  set(EVENSTEP_PC_LIBDIR "${CMAKE_INSTALL_LIBDIR}")
else()
  file(RELATIVE_PATH up "/prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig" /prefix)
  string(REGEX REPLACE "/$" "" up "${up}")
  set(EVENSTEP_PC_PREFIX "\${pcfiledir}/${up}")
  set(EVENSTEP_PC_LIBDIR "\${prefix}/${CMAKE_INSTALL_LIBDIR}")
endif()
if(IS_ABSOLUTE "${CMAKE_INSTALL_INCLUDEDIR}")
  set(EVENSTEP_PC_INCLUDEDIR "${CMAKE_INSTALL_INCLUDEDIR}")
else()
  set(EVENSTEP_PC_INCLUDEDIR "\${prefix}/${CMAKE_INSTALL_INCLUDEDIR}")
endif()
configure_file(${CMAKE_CURRENT_LIST_DIR}/evenstep.pc.in ${PROJECT_BINARY_DIR}/evenstep.pc @ONLY)
set(package ${CMAKE_INSTALL_LIBDIR}/cmake/evenstep)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/evenstepConfigVersion.cmake COMPATIBILITY SameMajorVersion)

install(TARGETS evenstep_library EXPORT evenstep LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/evenstep DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
set(documents ${CMAKE_INSTALL_DATAROOTDIR}/doc/evenstep)
if(PROJECT_IS_TOP_LEVEL)
  set(documents ${CMAKE_INSTALL_DOCDIR}) # of another project it is that project's
endif()
install(FILES LICENSE NOTICE DESTINATION ${documents})
install(DIRECTORY licenses DESTINATION ${documents})
install(FILES ${PROJECT_BINARY_DIR}/evenstep.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
install(EXPORT evenstep NAMESPACE evenstep:: FILE evenstepConfig.cmake DESTINATION ${package})
install(FILES ${PROJECT_BINARY_DIR}/evenstepConfigVersion.cmake DESTINATION ${package})
