/* The sign in a run folder: its lines, and whether it is one's own job's. */
#include "os/lease_sign.h"

#include "base/fail.h"
#include "os/calls.h"
#include "os/lease.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *next_line(const char *at, char *out) {
  size_t length = strcspn(at, "\n");
  (void)snprintf(out, EVEN_LEASE_MOST_LINE, "%.*s",
                 (int)(length < EVEN_LEASE_MOST_LINE ? length : EVEN_LEASE_MOST_LINE - 1), at);
  return at[length] == '\n' ? at + length + 1 : at + length;
}

void even_lease_read_holder(const char *text, even_lease_holder *out) {
  char turn[EVEN_LEASE_MOST_LINE];
  const char *at = next_line(text, out->identity);
  at = next_line(at, out->host);
  at = next_line(at, out->process);
  at = next_line(at, out->owner);
  (void)next_line(at, turn);
  out->turn = strtoull(turn, NULL, 10);
}

even_status even_lease_look_at(const char *path, const char *own, even_lease_look *out) {
  struct stat facts;
  memset(out, 0, sizeof *out);
  int fd = even_os.open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0);
  if (fd < 0) {
    return errno == ENOENT ? EVEN_OK : even_fail_errno(errno, "%s cannot be opened", path);
  }
  even_status status = EVEN_OK;
  ssize_t got = even_os.read(fd, out->text, sizeof out->text - 1);
  if (got < 0 || even_os.fstat(fd, &facts) != 0) {
    status = even_fail_errno(errno, "%s cannot be read", path);
  } else {
    out->there = true;
    out->changed = facts.st_ctim;
    out->written = facts.st_mtim;
    if (own != NULL && strcmp(own, out->text) == 0 && even_os.touch(fd) != 0) {
      status = even_fail_errno(errno, "%s cannot be renewed", path);
    }
  }
  (void)even_os.close(fd);
  return status;
}

void even_lease_add_holder(const even_lease_holder *it, even_text *out) {
  if (it->host[0] == '\0') {
    even_text_add(out, "another host");
  } else {
    even_text_format(out, "host %s (process %s)", it->host, it->process);
  }
}

even_status even_lease_tell_lost(const char *folder, const char *own_text, const char *taker) {
  even_lease_holder own;
  even_lease_holder now;
  even_text who = EVEN_TEXT_EMPTY;
  even_lease_read_holder(own_text, &own);
  even_lease_read_holder(taker, &now);
  bool next = now.owner[0] != '\0' && strcmp(own.owner, now.owner) == 0;
  if (taker[0] == '\0') {
    even_text_add(&who, "its sign " EVEN_LEASE_SIGN " is gone");
  } else {
    even_text_add(&who, next ? "this job goes on from " : "it was taken over from ");
    even_lease_add_holder(&now, &who);
  }
  even_status status =
      even_fail(EVEN_ERR_IN_USE, "run folder %s is not this process's any more: %s", folder, even_text_string(&who));
  even_text_free(&who);
  if (!next) {
    (void)even_error_fix(
        "where this process, or its file server, stood still for longer than %d s, go on with another "
        "--name and --resume; two jobs that live need a --name each",
        (int)(EVEN_LEASE_NS / 1000000000u));
  }
  return status;
}

/* ---- for who holds none ---- */

/* Of the folder by whose sign this process knows that its job keeps one: a process works for one job. */
static _Atomic bool was_seen;

/* What is being written there has no owner yet, and counts as gone. */
static even_status look_for(const char *path, const char *unseen, even_lease_look *sign, even_lease_holder *it) {
  EVEN_TRY(even_lease_look_at(path, NULL, sign));
  even_lease_read_holder(sign->text, it);
  if (it->owner[0] == '\0') {
    EVEN_TRY(even_lease_look_at(unseen, NULL, sign));
    even_lease_read_holder(sign->text, it);
  }
  return EVEN_OK;
}

/* One that is gone says nothing: the job goes on where its next leader has another folder, and the old one's is ended.
 */
static even_status judge(const char *folder, const char *owner, const char *path, const char *unseen) {
  even_lease_look sign;
  even_lease_holder it;
  EVEN_TRY(look_for(path, unseen, &sign, &it));
  if (strcmp(it.owner, owner) == 0) {
    atomic_store(&was_seen, true);
    return EVEN_OK;
  }
  bool others = it.owner[0] != '\0' && atomic_load(&was_seen);
  return others ? even_lease_tell_lost(folder, "", sign.text) : EVEN_OK;
}

even_status even_lease_is_of(const char *folder, const char *owner) {
  even_text path = EVEN_TEXT_EMPTY;
  even_text unseen = EVEN_TEXT_EMPTY;
  if (folder == NULL || folder[0] == '\0' || owner == NULL || owner[0] == '\0') {
    return EVEN_OK;
  }
  even_text_format(&path, "%s/%s", folder, EVEN_LEASE_SIGN);
  even_text_format(&unseen, "%s/%s", folder, EVEN_LEASE_UNSEEN);
  even_status status = even_text_status(&path) == EVEN_OK ? even_text_status(&unseen) : even_text_status(&path);
  if (status == EVEN_OK) {
    status = judge(folder, owner, path.data, unseen.data);
    if (status != EVEN_OK && status != EVEN_ERR_IN_USE) {
      even_error_clear(); /* where the server stands still, writing fails by itself */
      status = EVEN_OK;
    }
  }
  even_text_free(&path);
  even_text_free(&unseen);
  return status;
}

bool even_lease_is_known(const char *folder, const char *owner) {
  if (!atomic_load(&was_seen) && even_lease_is_of(folder, owner) != EVEN_OK) {
    even_error_clear(); /* of memory that is short */
  }
  return atomic_load(&was_seen);
}

void even_lease_heed(void) {
  atomic_store(&was_seen, true);
}
