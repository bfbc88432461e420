/* Which files of a checkpoint are sent, in which order, and by which sum both ends know it. */
#include "orchestrator/bring_files.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "checkpoint/manifest_writer.h"
#include "os/file.h"
#include "os/pipe.h"
#include "os/stream.h"

#include <evenstep/checkpoint.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { MOST_OPEN = 32 };

/* ---- the sum of a manifest ---- */

bool even_bring_sum_of(const char *folder, uint64_t *sum) {
  even_text path = EVEN_TEXT_EMPTY;
  even_text text = EVEN_TEXT_EMPTY;
  even_text_format(&path, "%s/%s", folder, EVEN_CHECKPOINT_MANIFEST);
  bool read =
      even_text_status(&path) == EVEN_OK && even_file_read(path.data, EVEN_MANIFEST_MOST_BYTES, &text) == EVEN_OK;
  *sum = read ? even_checkpoint_checksum(even_text_string(&text), text.length) : 0;
  even_text_free(&path);
  even_text_free(&text);
  even_error_clear(); /* what cannot be read is not had */
  return read;
}

void even_bring_sum_write(uint64_t sum, char digits[EVEN_BRING_SUM_DIGITS + 1]) {
  (void)snprintf(digits, EVEN_BRING_SUM_DIGITS + 1, "%016" PRIx64, sum);
}

bool even_bring_sum_read(const char *digits, uint64_t *sum) {
  *sum = strtoumax(digits, NULL, 16);
  return strlen(digits) == EVEN_BRING_SUM_DIGITS && strspn(digits, "0123456789abcdef") == EVEN_BRING_SUM_DIGITS;
}

void even_bring_mark_of(const char *folder, char mark[EVEN_FILE_MARK]) {
  even_text path = EVEN_TEXT_EMPTY;
  even_text_format(&path, "%s/%s", folder, EVEN_CHECKPOINT_MANIFEST);
  if (even_text_status(&path) != EVEN_OK || even_file_mark(path.data, mark) != EVEN_OK) {
    mark[0] = '\0';
  }
  even_text_free(&path);
  even_error_clear();
}

/* ---- its files ---- */

void even_bring_files_free(even_bring_files *files) {
  for (size_t i = 0; files->open != NULL && i <= files->info.file_count; i++) {
    even_pipe_close(files->open[i]);
  }
  even_free(files->open);
  even_free(files->had);
  even_text_free(&files->folder);
  even_checkpoint_info_free(&files->info);
  *files = (even_bring_files){.open = NULL};
}

void even_bring_files_spare(even_bring_files *files, const json_t *numbers) {
  size_t at = 0;
  json_t *number = NULL;
  json_array_foreach(numbers, at, number) {
    json_int_t file = json_integer_value(number);
    if (file > 0 && (uint64_t)file <= files->info.file_count) {
      files->had[file] = true;
    }
  }
}

static uint64_t bytes_of(const even_bring_files *files, size_t file) {
  return file == 0 ? files->manifest_bytes : files->info.files[file - 1].bytes;
}

static even_status open_file(const even_bring_files *files, size_t file, int *fd) {
  const char *name = file == 0 ? EVEN_CHECKPOINT_MANIFEST : files->info.files[file - 1].name;
  even_text path = EVEN_TEXT_EMPTY;
  even_input input = {.fd = -1};
  even_text_format(&path, "%s/%s", even_text_string(&files->folder), name);
  even_status status = even_text_status(&path);
  if (status == EVEN_OK) {
    status = even_input_open(path.data, &input);
  }
  if (status == EVEN_OK && input.bytes != bytes_of(files, file)) {
    status = even_fail(EVEN_ERR_CORRUPT, "%s has %" PRIu64 " bytes, and had %" PRIu64, path.data, input.bytes,
                       bytes_of(files, file));
    even_input_close(&input);
  }
  even_text_free(&path);
  *fd = input.fd;
  return status;
}

/* All of them, so that they may be removed here before they are sent. Of many files the descriptors are too many. */
static even_status open_files(even_bring_files *files) {
  if (files->info.file_count > MOST_OPEN) {
    return EVEN_OK;
  }
  EVEN_TRY(EVEN_NEW_ARRAY(&files->open, files->info.file_count + 1));
  for (size_t i = 0; i <= files->info.file_count; i++) {
    files->open[i] = -1;
  }
  for (size_t i = 0; i <= files->info.file_count; i++) {
    EVEN_TRY(open_file(files, i, &files->open[i]));
  }
  return EVEN_OK;
}

static even_status read_manifest(even_bring_files *files) {
  even_text text = EVEN_TEXT_EMPTY;
  even_status status = even_manifest_read(even_text_string(&files->folder), &text, &files->info);
  if (status == EVEN_OK && files->info.file_count >= EVEN_BRING_FILES) {
    status = even_fail(EVEN_ERR_UNSUPPORTED, "a checkpoint of %zu files", files->info.file_count);
  }
  if (status == EVEN_OK) {
    files->manifest_bytes = text.length;
    files->sum = even_checkpoint_checksum(text.data, text.length);
  }
  even_text_free(&text);
  return status;
}

even_status even_bring_files_read(const char *folder, bool keep, even_bring_files *out) {
  *out = (even_bring_files){.open = NULL};
  even_text_add(&out->folder, folder);
  EVEN_TRY(even_text_status(&out->folder));
  EVEN_TRY(read_manifest(out));
  EVEN_TRY(EVEN_NEW_ARRAY(&out->had, out->info.file_count + 1));
  return keep ? open_files(out) : EVEN_OK;
}

/* The file is the caller's then. */
static even_status give_file(even_bring_files *files, size_t file, int *fd) {
  if (files->open == NULL) {
    return open_file(files, file, fd);
  }
  *fd = files->open[file];
  files->open[file] = -1;
  return EVEN_OK;
}

/* Those of no bytes the other end makes itself, and some it has already. */
static bool is_sent(const even_bring_files *files, size_t file) {
  return file == 0 || (files->info.files[file - 1].bytes > 0 && !files->had[file]);
}

even_status even_bring_files_send_next(even_bring_files *files, even_parcels *parcels, int to, const char *name,
                                       uint64_t serial, even_parcel_done done, void *context) {
  int fd = -1;
  while (files->next <= files->info.file_count && !is_sent(files, files->next)) {
    files->spared_bytes += bytes_of(files, files->next++);
  }
  if (files->next > files->info.file_count) {
    return EVEN_OK; /* all are there: the other end says so when it has compared them */
  }
  size_t file = files->next++;
  EVEN_TRY(give_file(files, file, &fd));
  files->sent_bytes += bytes_of(files, file);
  return even_parcels_offer(parcels, to, name, serial * EVEN_BRING_FILES + file, fd, bytes_of(files, file), done,
                            context);
}
