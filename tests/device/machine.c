#include "device/machine.h"

#include "device/driver.h"

#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

void machine_make(machine *made, const char *synthetic) {
  (void)snprintf(made->root, sizeof made->root, "/tmp/evenstep-machine-XXXXXX");
  if (mkdtemp(made->root) == NULL) {
    abort();
  }
  made->source = (even_device_source){.root = made->root,
                                      .synthetic = synthetic,
                                      .cuda_library = "libevenstep-absent.so",
                                      .nvml_library = "libevenstep-absent.so"};
}

void machine_file(const machine *made, const char *path, const char *content) {
  char full[1024];
  int length = snprintf(full, sizeof full, "%s%s", made->root, path);
  if (length < 0 || (size_t)length >= sizeof full) {
    abort();
  }
  for (char *at = strchr(full + strlen(made->root) + 1, '/'); at != NULL; at = strchr(at + 1, '/')) {
    *at = '\0';
    (void)mkdir(full, 0755);
    *at = '/';
  }
  FILE *file = fopen(full, "w");
  if (file == NULL || fputs(content, file) < 0 || fclose(file) != 0) {
    abort();
  }
}

static int entry_remove(const char *path, const struct stat *info, int type, struct FTW *at) {
  (void)info;
  (void)type;
  (void)at;
  return remove(path);
}

void machine_remove(machine *made) {
  (void)nftw(made->root, entry_remove, 16, FTW_DEPTH | FTW_PHYS);
}

even_status machine_devices(const machine *made, even_device_list *out) {
  even_device_context context;
  *out = (even_device_list){0};
  even_status status = even_device_context_read(&made->source, &context);
  if (status == EVEN_OK) {
    status = even_device_append_all(&context, out);
  }
  even_device_context_free(&context);
  if (status != EVEN_OK) {
    even_device_list_free(out);
  }
  return status;
}
