/* Shared libraries opened at run time. */
#include "os/library.h"

#include "base/fail.h"
#include "os/calls.h"

#include <dlfcn.h>
#include <stddef.h>

even_status even_library_open(const char *name, even_library *out) {
  out->handle = even_os.dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (out->handle == NULL) {
    const char *why = dlerror();
    return even_fail(EVEN_ERR_NOT_FOUND, "library %s cannot be opened: %s", name, why != NULL ? why : "not found");
  }
  return EVEN_OK;
}

void *even_library_symbol(const even_library *library, const char *name) {
  return library->handle == NULL ? NULL : even_os.dlsym(library->handle, name);
}

void even_library_close(even_library *library) {
  if (library->handle != NULL) {
    (void)even_os.dlclose(library->handle);
    library->handle = NULL;
  }
}
