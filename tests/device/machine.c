#include "device/machine.h"

#include "device/driver.h"

#include <stdlib.h>

void machine_make(machine *made, const char *synthetic) {
  if (folder_make("machine", made->root) != 0) {
    abort();
  }
  made->source = (even_device_source){.root = made->root,
                                      .synthetic = synthetic,
                                      .cuda_library = "libevenstep-absent.so",
                                      .nvml_library = "libevenstep-absent.so"};
}

void machine_file(const machine *made, const char *path, const char *content) {
  folder_write(made->root, path + 1, content);
}

void machine_remove(machine *made) {
  (void)folder_remove(made->root);
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
