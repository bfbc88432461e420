/* Memory and swap from /proc/meminfo. */
#include "device/memory_facts.h"

#include "os/file.h"

#include <inttypes.h>
#include <string.h>

enum { FILE_LIMIT = 1 << 20 };

/* The number behind "\nNAME:" in /proc/meminfo, which says kB and means KiB. */
static uint64_t number_of(const char *content, const char *name) {
  size_t length = strlen(name);
  for (const char *line = content; *line != '\0'; line += strcspn(line, "\n"), line += *line == '\n' ? 1 : 0) {
    if (strncmp(line, name, length) == 0 && line[length] == ':') {
      return strtoumax(line + length + 1, NULL, 10);
    }
  }
  return 0;
}

even_status even_memory_facts_read(const even_device_source *source, even_memory_facts *out) {
  even_text path = EVEN_TEXT_EMPTY;
  even_text content = EVEN_TEXT_EMPTY;
  *out = (even_memory_facts){0};
  even_text_format(&path, "%s/proc/meminfo", source->root);
  even_status status = even_text_status(&path);
  if (status == EVEN_OK) {
    status = even_file_read(even_text_string(&path), FILE_LIMIT, &content);
  }
  if (status == EVEN_OK) {
    const char *text = even_text_string(&content);
    out->total_bytes = number_of(text, "MemTotal") * 1024;
    out->available_bytes = number_of(text, "MemAvailable") * 1024;
    out->swap_total_bytes = number_of(text, "SwapTotal") * 1024;
    out->swap_free_bytes = number_of(text, "SwapFree") * 1024;
    out->huge_page_bytes = number_of(text, "HugePages_Total") * number_of(text, "Hugepagesize") * 1024;
  }
  even_text_free(&path);
  even_text_free(&content);
  return status == EVEN_ERR_MEMORY ? status : EVEN_OK;
}
