/* A folder of a test's own, in which it invents files: a host's, in place of the kernel's. */
#ifndef EVEN_TESTS_SUPPORT_FOLDER_H
#define EVEN_TESTS_SUPPORT_FOLDER_H

#define FOLDER_BYTES 64

/* A new one, /tmp/evenstep-NAME-XXXXXX; 0, or -1: for a test's setup. */
int folder_make(const char *name, char path[FOLDER_BYTES]);
/* `text` as the file `path` below it, with the folders on the way. Fails the test where it cannot. */
void folder_write(const char *folder, const char *path, const char *text);
/* The folder with all that is in it; 0, or -1: for a test's teardown. */
int folder_remove(const char *folder);

#endif
