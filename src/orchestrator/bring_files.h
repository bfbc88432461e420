/* The files of a checkpoint of this host on their way to another one, as parcels, one after the other: the manifest is
 * the first. Of who sends them: the leader (bring.c), or a host that gives its leader a copy back (bring_give.c). */
#ifndef EVEN_ORCHESTRATOR_BRING_FILES_H
#define EVEN_ORCHESTRATOR_BRING_FILES_H

#include "checkpoint/reader.h"
#include "orchestrator/parcel.h"
#include "os/file.h"

/* Of the numbers of parcels of checkpoints: SERIAL * EVEN_BRING_FILES + FILE, where 0 is the manifest. */
enum { EVEN_BRING_FILES = 4096 };

/* The checksum of a manifest, by which two hosts know that they have the same checkpoint: of a checkpoint's folder
 * (false: it cannot be read), and as its 16 digits (false: these are none). */
bool even_bring_sum_of(const char *folder, uint64_t *sum);
enum { EVEN_BRING_SUM_DIGITS = 16 };
void even_bring_sum_write(uint64_t sum, char digits[EVEN_BRING_SUM_DIGITS + 1]);
bool even_bring_sum_read(const char *digits, uint64_t *sum);

/* By which hosts know that they see the same one (even_file_mark, of its manifest); "": it cannot be told. */
void even_bring_mark_of(const char *folder, char mark[EVEN_FILE_MARK]);

typedef struct even_bring_files {
  even_text folder; /* the checkpoint, here */
  even_checkpoint_info info;
  uint64_t sum; /* of its manifest, of */
  uint64_t manifest_bytes;
  size_t next; /* of its files, 0 the manifest */
  int *open;   /* each of them, -1: given away; NULL: each is opened when it is sent */
  bool *had;   /* which of its files the other end has already, the manifest among them */
  uint64_t sent_bytes;
  uint64_t spared_bytes;
} even_bring_files;

/* Reads its manifest. `keep`: its files may be removed here before they are sent. Free with even_bring_files_free, also
 * after a failure. Errors: those of reading, EVEN_ERR_UNSUPPORTED: it has too many files. */
even_status even_bring_files_read(const char *folder, bool keep, even_bring_files *out) EVEN_MUST_USE;
void even_bring_files_free(even_bring_files *files);
/* The other end has these already, by their numbers from 1 on (an array): they are not sent. Numbers that are none are
 * nobody's. */
void even_bring_files_spare(even_bring_files *files, const json_t *numbers);
/* Offers the next of those that are to be sent, the numbers of which have `serial`, and calls `done` for it, as
 * even_parcels_offer; nothing where all were. */
even_status even_bring_files_send_next(even_bring_files *files, even_parcels *parcels, int to, const char *name,
                                       uint64_t serial, even_parcel_done done, void *context) EVEN_MUST_USE;

#endif
