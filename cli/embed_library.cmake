# A file as a C array:  cmake -DINPUT=FILE -DNAME=name -DHEADER=cli/name.h -DOUTPUT=name.c -P embed_library.cmake
file(READ ${INPUT} content HEX)
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${content}")
string(REGEX REPLACE "(................................................................................)" "\\1\n" bytes "${bytes}")
file(WRITE ${OUTPUT} "/* made by cli/embed_library.cmake */\n#include \"${HEADER}\"\n
const unsigned char ${NAME}[] = {\n${bytes}};\nconst size_t ${NAME}_bytes = sizeof ${NAME};\n")
