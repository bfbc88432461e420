/* The version of these headers; even_version() gives that of the library. */
#ifndef EVENSTEP_VERSION_H
#define EVENSTEP_VERSION_H

#include <evenstep/status.h>

#ifdef __cplusplus
extern "C" {
#endif

#define EVEN_VERSION "0.1.0"
/* The same in numbers, for #if. */
#define EVEN_VERSION_MAJOR 0
#define EVEN_VERSION_MINOR 1
#define EVEN_VERSION_PATCH 0

/* A static string. Any thread. */
EVEN_PUBLIC const char *even_version(void);
/* The commit of which the library was built, in hexadecimal; with a + behind it where files were changed since; ""
 * where there was no repository to ask. A static string. Any thread. */
EVEN_PUBLIC const char *even_commit(void);

#ifdef __cplusplus
}
#endif

#endif
