/* Reads only the first lines of the manifests, as text: this side has no JSON reader. */
#include "checkpoint/created.h"

#include "base/fail.h"
#include "base/text.h"
#include "os/clock.h"
#include "os/file.h"
#include "os/folder.h"

#include <evenstep/checkpoint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define SECOND_NS UINT64_C(1000000000)
#define START_BYTES 512
#define LAST_SECOND 16000000000 /* year 2477: 64 bits of ns hold it */

void even_created_text(uint64_t created_ns, char text[EVEN_CREATED_BYTES]) {
  struct tm parts;
  time_t seconds = (time_t)(created_ns / SECOND_NS);
  (void)gmtime_r(&seconds, &parts);
  (void)snprintf(text, EVEN_CREATED_BYTES, "%04d-%02d-%02dT%02d:%02d:%02d.%06uZ", parts.tm_year + 1900,
                 parts.tm_mon + 1, parts.tm_mday, parts.tm_hour, parts.tm_min, parts.tm_sec,
                 (unsigned)(created_ns % SECOND_NS / 1000u));
}

/* 0 where no time stands there. */
static uint64_t created_of(const char *manifest_start) {
  static const char KEY[] = "\"created\":";
  struct tm parts = {0};
  unsigned micros = 0;
  const char *at = strstr(manifest_start, KEY);
  if (at == NULL || sscanf(at + strlen(KEY), " \"%4d-%2d-%2dT%2d:%2d:%2d.%6uZ\"", &parts.tm_year, &parts.tm_mon,
                           &parts.tm_mday, &parts.tm_hour, &parts.tm_min, &parts.tm_sec, &micros) != 7) {
    return 0;
  }
  parts.tm_year -= 1900;
  parts.tm_mon -= 1;
  time_t seconds = timegm(&parts);
  return seconds <= 0 || seconds > LAST_SECOND ? 0 : (uint64_t)seconds * SECOND_NS + micros * UINT64_C(1000);
}

even_status even_checkpoint_now(const char *parent, uint64_t *out) {
  even_names names = {NULL, 0};
  even_text path = EVEN_TEXT_EMPTY;
  even_text start = EVEN_TEXT_EMPTY;
  even_error kept = *even_error_last();
  *out = even_clock_wall_ns();
  even_status status = even_folder_names(parent, &names);
  for (size_t i = 0; i < names.count && status == EVEN_OK; i++) {
    even_text_clear(&path);
    even_text_clear(&start);
    even_text_format(&path, "%s/%s/%s", parent, names.items[i], EVEN_CHECKPOINT_MANIFEST);
    status = even_text_status(&path);
    if (status == EVEN_OK && even_file_start(even_text_string(&path), START_BYTES, &start) == EVEN_OK) {
      uint64_t there = created_of(even_text_string(&start));
      *out = there >= *out / 1000u * 1000u ? there + 1000u : *out;
    }
  }
  if (status == EVEN_OK) {
    (void)even_error_restore(&kept); /* what is no checkpoint is no error */
  }
  even_text_free(&start);
  even_text_free(&path);
  even_names_free(&names);
  return status;
}
