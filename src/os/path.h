/* What a path names: whether it is there, where it lies; this program's own and the host's name. */
#ifndef EVEN_OS_PATH_H
#define EVEN_OS_PATH_H

#include "base/text.h"

#include <stdbool.h>

/* Whether this process may read, or run, what has this path. */
bool even_file_readable(const char *path);
bool even_file_executable(const char *path);
/* `path` as seen from the root, into `out` (replaced); links are not followed. */
even_status even_path_absolute(const char *path, even_text *out) EVEN_MUST_USE;
/* Whether it is a URL (s3://bucket/run), and no path. */
bool even_path_is_url(const char *path);
/* The last part of a path: what follows its last slash, or all of it. */
const char *even_path_name(const char *path);
/* Makes it this process's working folder. */
even_status even_path_enter(const char *path) EVEN_MUST_USE;
/* The file of the running program, into `out` (replaced). */
even_status even_program_path(even_text *out) EVEN_MUST_USE;
/* The host's name, "localhost" where it cannot be read; cut to fit. */
void even_host_name(char *out, size_t bytes);

#endif
