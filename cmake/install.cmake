# Installs the library, its headers and the package files behind find_package(braid).
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
install(TARGETS braid EXPORT braidTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(TARGETS torch_cpu_only EXPORT braidTargets)
install(DIRECTORY src/braid DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(EXPORT braidTargets DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/braid NAMESPACE braid::)
file(WRITE ${PROJECT_BINARY_DIR}/braidConfig.cmake
"include(CMakeFindDependencyMacro)
find_dependency(nlohmann_json)
find_dependency(Threads)
include(\${CMAKE_CURRENT_LIST_DIR}/braidTargets.cmake)
")
write_basic_package_version_file(${PROJECT_BINARY_DIR}/braidConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/braidConfig.cmake ${PROJECT_BINARY_DIR}/braidConfigVersion.cmake
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/braid)
