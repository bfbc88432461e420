#include "support/folder.h"

#include <ftw.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <cmocka.h>

int folder_make(const char *name, char path[FOLDER_BYTES]) {
  (void)snprintf(path, FOLDER_BYTES, "/tmp/evenstep-%s-XXXXXX", name);
  return mkdtemp(path) == NULL ? -1 : 0;
}

void folder_write(const char *folder, const char *path, const char *text) {
  char whole[1024];
  int length = snprintf(whole, sizeof whole, "%s/%s", folder, path);
  assert_true(length > 0 && (size_t)length < sizeof whole);
  for (char *at = whole + strlen(folder) + 1; (at = strchr(at, '/')) != NULL; at++) {
    *at = '\0';
    (void)mkdir(whole, 0755);
    *at = '/';
  }
  FILE *file = fopen(whole, "w");
  if (file == NULL) {
    fail_msg("%s cannot be written", whole);
    return;
  }
  assert_true(fputs(text, file) >= 0);
  assert_int_equal(fclose(file), 0);
}

static int remove_entry(const char *path, const struct stat *info, int type, struct FTW *at) {
  (void)info;
  (void)type;
  (void)at;
  return remove(path);
}

int folder_remove(const char *folder) {
  return nftw(folder, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
}
