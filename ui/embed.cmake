# A page and what belongs to it as one C array:
#   cmake -DSOURCE=ui -DPAGE=page.html -DNAME=even_page_html -DOUTPUT=page_html.c -P embed.cmake
# Where the page says @chart.js@, that file goes. Works on hexadecimal text, so that no character of the files means anything
# to CMake.
file(READ ${SOURCE}/${PAGE} words)
string(REGEX MATCHALL "@[a-z]+\\.(css|js)@" markers "${words}")
file(READ ${SOURCE}/${PAGE} page HEX)
foreach(marker ${markers})
  string(REPLACE "@" "" part "${marker}")
  file(READ ${SOURCE}/${part} content HEX)
  string(HEX "${marker}" place)
  string(REPLACE "${place}" "${content}" page "${page}")
endforeach()
if(NOT markers)
  message(FATAL_ERROR "${PAGE} has no @style.css@")
endif()
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${page}")
string(REGEX REPLACE "(................................................................................)" "\\1\n" bytes "${bytes}")
file(WRITE ${OUTPUT} "/* made from ui/ by embed.cmake */\n#include \"monitor/page.h\"\n
const unsigned char ${NAME}[] = {\n${bytes}};\nconst size_t ${NAME}_bytes = sizeof ${NAME};\n")
