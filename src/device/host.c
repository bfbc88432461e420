/* The facts about a host, gathered from the rooms below. */
#include "device/host.h"

#include "base/fail.h"
#include "device/cpu/simd.h"
#include "os/file.h"

#include <stdio.h>
#include <string.h>

enum { FILE_LIMIT = 1 << 20 };

static even_status file_below(const even_device_source *source, const char *path, even_text *out) {
  even_text full = EVEN_TEXT_EMPTY;
  even_text_format(&full, "%s%s", source->root, path);
  even_status status = even_text_status(&full);
  if (status == EVEN_OK) {
    status = even_file_read(even_text_string(&full), FILE_LIMIT, out);
  }
  even_text_free(&full);
  return status;
}

/* PRETTY_NAME of os-release(5). */
static even_status distribution_read(const even_device_source *source, even_host *out) {
  even_text content = EVEN_TEXT_EMPTY;
  even_status status = file_below(source, "/etc/os-release", &content);
  const char *at = strstr(even_text_string(&content), "PRETTY_NAME=");
  if (status == EVEN_OK && at != NULL) {
    at += strlen("PRETTY_NAME=");
    at += *at == '"' ? 1 : 0;
    (void)snprintf(out->distribution, sizeof out->distribution, "%.*s", (int)strcspn(at, "\"\n"), at);
  }
  even_text_free(&content);
  return status == EVEN_ERR_MEMORY ? status : EVEN_OK;
}

static even_status tolerate(even_status status) {
  return status == EVEN_ERR_MEMORY ? status : EVEN_OK;
}

even_status even_host_read(const even_device_source *source, const char *folder, even_host *out) {
  *out = (even_host){0};
  (void)snprintf(out->folder, sizeof out->folder, "%s", folder);
  (void)even_cpu_simd_words(out->simd, sizeof out->simd);
  EVEN_TRY(even_device_context_read(source, &out->context));
  EVEN_TRY(tolerate(even_host_names_read(&out->names)));
  EVEN_TRY(distribution_read(source, out));
  EVEN_TRY(even_memory_facts_read(source, &out->memory));
  EVEN_TRY(tolerate(even_disk_read(folder, &out->disk)));
  EVEN_TRY(tolerate(even_interface_list_read(&out->interfaces)));
  EVEN_TRY(even_gpu_list_read(source, &out->gpus));
  return even_device_append_all(&out->context, &out->devices);
}

void even_host_free(even_host *host) {
  even_device_context_free(&host->context);
  even_interface_list_free(&host->interfaces);
  even_gpu_list_free(&host->gpus);
  even_device_list_free(&host->devices);
}

void even_host_network_json(even_json *json, const even_interface_list *interfaces) {
  even_json_array(json, "network");
  for (size_t i = 0; i < interfaces->count; i++) {
    const even_interface *interface = &interfaces->items[i];
    even_json_object(json, NULL);
    even_json_string(json, "name", interface->name);
    even_json_bool(json, "up", interface->up);
    even_json_bool(json, "loopback", interface->loopback);
    if (interface->megabits_per_second > 0) {
      even_json_integer(json, "megabits_per_second", interface->megabits_per_second);
    } else {
      even_json_null(json, "megabits_per_second");
    }
    even_json_string(json, "addresses", interface->addresses);
    even_json_object_end(json);
  }
  even_json_array_end(json);
}
