# Warnings and sanitizers, for all targets.
add_library(evenstep_flags INTERFACE)
target_compile_definitions(evenstep_flags INTERFACE _GNU_SOURCE)
target_compile_options(evenstep_flags INTERFACE -Wall -Wextra -Wconversion -Wshadow -Wstrict-prototypes
                                                -Wmissing-prototypes -Wpointer-arith -Wvla -fno-strict-aliasing)
if(CMAKE_C_COMPILER_ID MATCHES "Clang")
  # long texts in tables are written as several literals on purpose
  target_compile_options(evenstep_flags INTERFACE -Wno-string-concatenation)
endif()
# Of a project that says no build type (without one at top level CMakeLists.txt takes Release) the library is as fast all the same.
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES AND NOT CMAKE_C_FLAGS MATCHES "-O")
  target_compile_options(evenstep_flags INTERFACE -O3 -DNDEBUG)
endif()
if(EVENSTEP_WERROR)
  target_compile_options(evenstep_flags INTERFACE -Werror)
endif()
if(EVENSTEP_SANITIZE)
  # Less optimised, and what a target says that waits more than it computes (EVENSTEP_WAITS) not at all: compiled in two thirds and in less than
  # half of the time, and more of what is written is looked at. Lines, for their reports' stacks, but no variables.
  target_compile_options(evenstep_flags INTERFACE $<IF:$<BOOL:$<TARGET_PROPERTY:EVENSTEP_WAITS>>,-O0,-O1> -g1 -fsanitize=${EVENSTEP_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(evenstep_flags INTERFACE -fsanitize=${EVENSTEP_SANITIZE})
  # Links a sanitizer's program in half of the time that the default linker takes; there are hundreds.
  include(CheckLinkerFlag)
  check_linker_flag(C -fuse-ld=gold EVENSTEP_HAS_GOLD)
  if(EVENSTEP_HAS_GOLD)
    target_link_options(evenstep_flags INTERFACE -fuse-ld=gold)
  endif()
endif()
