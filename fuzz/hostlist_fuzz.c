/* A list of hosts as an environment says it. */
#include "orchestrator/hostlist.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  even_hostlist list;
  char *text = malloc(size + 1);
  if (text == NULL) {
    return 0;
  }
  memcpy(text, data, size);
  text[size] = '\0';
  if (even_hostlist_expand(text, &list) == EVEN_OK && (list.count == 0 || list.count > EVEN_HOSTS_MOST)) {
    abort();
  }
  for (size_t i = 0; i < list.count; i++) {
    size_t length = strnlen(list.names[i], sizeof list.names[i]);
    if (length == 0 || length == sizeof list.names[i] || strpbrk(list.names[i], "[],") != NULL) {
      abort();
    }
  }
  even_hostlist_free(&list);
  free(text);
  return 0;
}
