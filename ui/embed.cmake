# The page and what belongs to it as one C array: cmake -DSOURCE=ui -DOUTPUT=page_html.c -P embed.cmake
# Works on hexadecimal text, so that no character of the files means anything to CMake.
file(READ ${SOURCE}/page.html page HEX)
foreach(part style.css chart.js report.js page.js)
  file(READ ${SOURCE}/${part} content HEX)
  string(HEX "@${part}@" marker)
  string(FIND "${page}" "${marker}" found)
  if(found LESS 0)
    message(FATAL_ERROR "page.html has no @${part}@")
  endif()
  string(REPLACE "${marker}" "${content}" page "${page}")
endforeach()
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${page}")
string(REGEX REPLACE "(................................................................................)" "\\1\n" bytes "${bytes}")
file(WRITE ${OUTPUT} "/* made from ui/ by embed.cmake */\n#include \"monitor/page.h\"\n
const unsigned char even_page_html[] = {\n${bytes}};\nconst size_t even_page_html_bytes = sizeof even_page_html;\n")
