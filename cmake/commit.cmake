# cmake -DSOURCE=… -DOUT=… -P commit.cmake: writes the header with the commit that is built, and touches it only where it
# says something new. In an sdist, or in another project's repository, it says none.
cmake_minimum_required(VERSION 3.22)
set(commit "")
if(EXISTS ${SOURCE}/.git)
  execute_process(
    COMMAND git -C ${SOURCE} describe --always --abbrev=12 --exclude=* --dirty=+
    OUTPUT_VARIABLE said OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
  if(failed EQUAL 0 AND said MATCHES "^[0-9a-f]+\\+?$")
    set(commit ${said})
  endif()
endif()
file(CONFIGURE OUTPUT ${OUT} CONTENT "#define EVEN_COMMIT \"@commit@\"\n" @ONLY)
