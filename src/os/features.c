/* Trying what the kernel can do. */
#include "os/features.h"

#include "os/calls.h"
#include "os/shared_memory.h"

bool even_feature_pidfd(void) {
  int fd = even_os.pidfd_open(even_os.getpid(), 0);
  if (fd < 0) {
    return false;
  }
  (void)even_os.close(fd);
  return true;
}

bool even_feature_shared_memory(char *folder, size_t bytes) {
  even_shared_memory memory;
  if (even_shared_memory_create("evenstep-doctor", 4096, &memory) != EVEN_OK) {
    return false;
  }
  if (!even_shared_memory_is_file(memory.fd, folder, bytes)) {
    folder[0] = '\0';
  }
  even_shared_memory_close(&memory);
  return true;
}
