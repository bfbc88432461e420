/* Shared libraries opened at run time. */
#include "os/library.h"

#include "base/fail.h"
#include "os/calls.h"

#include <dlfcn.h>
#include <string.h>

even_status even_library_open(const char *name, even_library *out) {
  out->handle = even_os.dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (out->handle == NULL) {
    const char *why = dlerror();
    return even_fail(EVEN_ERR_NOT_FOUND, "library %s cannot be opened: %s", name, why != NULL ? why : "not found");
  }
  return EVEN_OK;
}

even_status even_library_find(const char *name, even_library *out) {
  out->handle = even_os.dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  return out->handle != NULL ? EVEN_OK : even_fail(EVEN_ERR_NOT_FOUND, "library %s is not in this process", name);
}

void *even_library_symbol(const even_library *library, const char *name) {
  return library->handle == NULL ? NULL : even_os.dlsym(library->handle, name);
}

const char *even_library_take(const even_library *library, const even_library_wanted *wanted, size_t count,
                              void *table) {
  for (size_t i = 0; i < count; i++) {
    void *symbol = even_library_symbol(library, wanted[i].name);
    if (symbol == NULL && !wanted[i].optional) {
      return wanted[i].name;
    }
    memcpy((char *)table + wanted[i].offset, &symbol, sizeof symbol);
  }
  return NULL;
}

void even_library_close(even_library *library) {
  if (library->handle != NULL) {
    (void)even_os.dlclose(library->handle);
    library->handle = NULL;
  }
}
