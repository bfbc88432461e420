/* A file in place of a memfd, where the kernel gives none (a container's seccomp profile): in memory where there is
 * room, else on a disk. */
#ifndef EVEN_OS_SHARED_FILE_H
#define EVEN_OS_SHARED_FILE_H

#include <evenstep/status.h>
#include <stdbool.h>
#include <stddef.h>

/* A new file of so many zeros, all of them taken, that only this user can open; its name, LABEL and random digits, is
 * gone when this returns, so that it ends with the last process that holds it. It lies in the first of /dev/shm, /tmp
 * and /var/tmp that has the room: EVEN_ERR_NO_SPACE, _PERMISSION … with what each of them said. */
even_status even_shared_file_create(const char *label, size_t bytes, int *fd) EVEN_MUST_USE;
/* Whether `path`, where the kernel says that a descriptor leads, was such a file of that label. */
bool even_shared_file_has_label(const char *path, const char *label);
/* The same of any label that begins with "evenstep-". Puts the folder's name before the file's into `folder`. */
bool even_shared_file_folder(const char *path, char *folder, size_t bytes);

#endif
