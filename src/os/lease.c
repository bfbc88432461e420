/* The sign: lines of text, made with O_EXCL, renewed by its times, taken over by renaming it away. */
#include "os/lease.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/stop.h"
#include "base/text.h"
#include "os/calls.h"
#include "os/clock.h"
#include "os/file.h"
#include "os/folder.h"
#include "os/futex.h"
#include "os/host.h"
#include "os/lease_sign.h"
#include "os/locks.h"
#include "os/path.h"
#include "os/process_stat.h"
#include "os/random.h"
#include "os/thread.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Whoever is in the way again and again lives. */
enum { MOST_ATTEMPTS = 4, MARK_DIGITS = 16 };

static const uint64_t LOOK_NS = UINT64_C(250000000);
static const uint64_t MOST_WATCHED_NS = 4 * EVEN_LEASE_NS; /* where hardly a look succeeds */

struct even_lease {
  even_text folder;
  even_text path;
  even_text unseen_path;
  even_text text;
  char mark[MARK_DIGITS + 1];
  pthread_mutex_t renewing;
  pthread_t thread;
  bool kept;
  _Atomic uint32_t ends;
  _Atomic uint64_t renewed_ns;
  _Atomic uint64_t tried_ns;
  _Atomic bool lost;
  char taker[EVEN_LEASE_MOST_TEXT]; /* the sign that lies there instead, "" for none: once it is lost */
  _Atomic bool unseen;
  /* of who renews: */
  bool missed; /* by the last look that succeeded */
  bool moves;  /* its times do; until that is known: */
  even_lease_look first;
  uint64_t first_ns;
};

/* ---- the sign ---- */

static even_status set_paths(even_lease *lease, const char *folder) {
  even_text_clear(&lease->folder);
  even_text_clear(&lease->path);
  even_text_clear(&lease->unseen_path);
  even_text_add(&lease->folder, folder);
  even_text_format(&lease->path, "%s/%s", folder, EVEN_LEASE_SIGN);
  even_text_format(&lease->unseen_path, "%s/%s", folder, EVEN_LEASE_UNSEEN);
  EVEN_TRY(even_text_status(&lease->folder));
  EVEN_TRY(even_text_status(&lease->unseen_path));
  return even_text_status(&lease->path);
}

static even_status write_text(const even_lease_params *params, even_lease *lease) {
  char identity[EVEN_LEASE_MOST_LINE];
  char host[128];
  even_host_identity(identity, sizeof identity);
  even_host_name(host, sizeof host);
  EVEN_TRY(even_random_hex(lease->mark, MARK_DIGITS));
  EVEN_TRY(set_paths(lease, params->folder));
  even_text_format(&lease->text, "%s\n%s\n%ld\n%s\n%llu\n%s\n", identity, host, (long)even_own_process(), params->owner,
                   (unsigned long long)params->turn, lease->mark);
  EVEN_TRY(even_text_status(&lease->text));
  return lease->text.length < EVEN_LEASE_MOST_TEXT ? EVEN_OK
                                                   : even_fail(EVEN_ERR_OVERFLOW, "the sign in %s", params->folder);
}

static bool same_time(const struct timespec *a, const struct timespec *b) {
  return a->tv_sec == b->tv_sec && a->tv_nsec == b->tv_nsec;
}

static bool has_moved(const even_lease_look *before, const even_lease_look *now) {
  return strcmp(before->text, now->text) != 0 || !same_time(&before->changed, &now->changed) ||
         !same_time(&before->written, &now->written);
}

/* EVEN_ERR_IN_USE: there is one. A server that has no room says so by fsync, or close. */
static even_status make_sign(even_lease *lease) {
  const char *path = lease->path.data;
  int fd = even_os.open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
  if (fd < 0) {
    return even_fail_errno(errno, "%s cannot be created", path);
  }
  even_status status = even_file_write_all(fd, lease->text.data, lease->text.length);
  if (status == EVEN_OK && even_os.fsync(fd) != 0) {
    status = even_fail_errno(errno, "it cannot be synced");
  }
  if (status == EVEN_OK && even_os.touch(fd) != 0) {
    status = even_fail_errno(errno, "its time cannot be moved");
  }
  if (even_os.close(fd) != 0 && status == EVEN_OK) {
    status = even_fail_errno(errno, "it cannot be closed");
  }
  if (status != EVEN_OK) {
    (void)even_error_prefix("%s", path);
    (void)even_os.unlink(path);
    return status == EVEN_ERR_IN_USE ? even_error_means(EVEN_ERR_SYSTEM) : status;
  }
  return EVEN_OK;
}

/* ---- another's ---- */

static even_status in_use(const even_lease *lease, const even_lease_look *seen) {
  even_lease_holder it;
  even_text who = EVEN_TEXT_EMPTY;
  even_lease_read_holder(seen->text, &it);
  even_lease_add_holder(&it, &who);
  even_status status = even_fail(EVEN_ERR_IN_USE, "run folder %s belongs to a job that is running on %s",
                                 lease->folder.data, even_text_string(&who));
  even_text_free(&who);
  (void)even_error_fix("choose another --name or --runs-dir, or end that job first");
  return status;
}

static even_status put_back(const even_lease *lease, const char *away) {
  even_status status = even_file_link(away, lease->path.data);
  bool done = status == EVEN_OK || status == EVEN_ERR_IN_USE; /* else there are no links */
  return done ? even_file_remove(away) : even_file_rename(away, lease->path.data);
}

/* Renamed away first: of several that do so one alone gets it, and what is not the one that was seen goes back; where
 * it was watched, also what was renewed since (renaming moves no more than st_ctime). */
static even_status displace(const even_lease *lease, const even_lease_look *seen, bool watched) {
  even_text away = EVEN_TEXT_EMPTY;
  even_lease_look got;
  even_text_format(&away, "%s.%s", lease->path.data, lease->mark);
  even_status status = even_text_status(&away);
  if (status == EVEN_OK && even_os.rename(lease->path.data, away.data) != 0) {
    status = errno == ENOENT ? EVEN_OK : even_fail_errno(errno, "%s cannot be renamed", lease->path.data);
  } else if (status == EVEN_OK) {
    status = even_lease_look_at(away.data, NULL, &got);
    if (status == EVEN_OK && strcmp(got.text, seen->text) == 0 &&
        (!watched || same_time(&got.written, &seen->written))) {
      status = even_file_remove(away.data);
    } else {
      even_status back = put_back(lease, away.data);
      status = back == EVEN_OK ? in_use(lease, status == EVEN_OK ? &got : seen) : back;
    }
  }
  even_text_free(&away);
  return status;
}

static void tell_wait(const even_lease_params *params, const even_lease_holder *it) {
  even_text words = EVEN_TEXT_EMPTY;
  if (params->tell == NULL) {
    return;
  }
  even_text_format(&words, "run folder %s has the sign of a job on ", params->folder);
  even_lease_add_holder(it, &words);
  even_text_format(&words, ": looking for %d s whether that lives", (int)(EVEN_LEASE_NS / 1000000000u));
  params->tell(params->context, even_text_string(&words));
  even_text_free(&words);
}

/* EVEN_OK: it is gone, or has not moved. While nobody can look, its holder may not be able to renew it either: what
 * lies between two looks that succeeded counts, and no more of it than the time for two. */
static even_status watch(const even_lease *lease, const even_lease_look *seen) {
  const uint64_t began_ns = even_clock_boot_ns();
  uint64_t seen_ns = began_ns;
  uint64_t still_ns = 0;
  while (still_ns < EVEN_LEASE_NS) {
    even_lease_look now;
    if (even_stop_asked()) {
      return even_fail(EVEN_ERR_INTERRUPTED, "interrupted while run folder %s was looked at", lease->folder.data);
    }
    even_clock_sleep_ns(LOOK_NS);
    uint64_t asked_ns = even_clock_boot_ns();
    if (asked_ns - began_ns > MOST_WATCHED_NS) {
      (void)in_use(lease, seen);
      return even_error_prefix("%s can hardly be looked at", lease->path.data);
    }
    if (even_lease_look_at(lease->path.data, NULL, &now) != EVEN_OK) {
      even_error_clear();
      continue;
    }
    if (!now.there) {
      return EVEN_OK;
    }
    if (has_moved(seen, &now)) {
      return in_use(lease, &now);
    }
    uint64_t between_ns = asked_ns - seen_ns;
    still_ns += between_ns < 2 * LOOK_NS ? between_ns : 2 * LOOK_NS;
    seen_ns = asked_ns;
  }
  return EVEN_OK;
}

/* Of those that can be named from here (even_host_identity). */
static bool is_dead(const even_lease_holder *it) {
  even_process_stat process;
  long pid = strtol(it->process, NULL, 10);
  if (pid <= 0) {
    return false;
  }
  if (even_os.kill((pid_t)pid, 0) != 0 && errno == ESRCH) {
    return true;
  }
  return even_process_stat_read((pid_t)pid, &process) == 0 && even_process_stat_ended(&process);
}

/* No lock of this host tells: it may have the folder mounted twice, with locks of each mount's own. */
static bool is_left_over(const even_lease_params *params, const even_lease_holder *it) {
  char here[EVEN_LEASE_MOST_LINE];
  even_host_identity(here, sizeof here);
  bool same_host = here[0] != '\0' && strcmp(here, it->identity) == 0;
  bool same_owner = strcmp(params->owner, it->owner) == 0;
  return (same_host && is_dead(it)) || (same_owner && it->turn < params->turn);
}

static even_status unreadable(const even_lease *lease) {
  (void)even_error_means(EVEN_ERR_IN_USE);
  (void)even_error_prefix("run folder %s has the sign of another job", lease->folder.data);
  (void)even_error_fix("choose another --name or --runs-dir, or where no job uses that folder remove %s",
                       lease->path.data);
  return EVEN_ERR_IN_USE;
}

/* EVEN_OK: the name may be free now. The folder is listed, for a client believes for long what it last saw of names. */
static even_status settle(const even_lease_params *params, even_lease *lease) {
  even_names names = {NULL, 0};
  even_lease_look seen;
  even_lease_holder it;
  if (even_folder_names(params->folder, &names) != EVEN_OK) {
    even_error_clear();
  }
  even_names_free(&names);
  if (even_lease_look_at(lease->path.data, NULL, &seen) != EVEN_OK) {
    return unreadable(lease);
  }
  if (!seen.there) {
    return EVEN_OK;
  }
  even_lease_read_holder(seen.text, &it);
  bool watched = !is_left_over(params, &it);
  if (watched) {
    if (!params->patient) {
      return in_use(lease, &seen);
    }
    tell_wait(params, &it);
    EVEN_TRY(watch(lease, &seen));
  }
  return displace(lease, &seen, watched);
}

/* ---- this one's ---- */

static even_status take(const even_lease_params *params, even_lease *lease) {
  EVEN_TRY(write_text(params, lease));
  even_status status = EVEN_OK;
  for (int i = 0; i < MOST_ATTEMPTS; i++) {
    status = make_sign(lease);
    if (status != EVEN_ERR_IN_USE) {
      break;
    }
    EVEN_TRY(settle(params, lease));
  }
  atomic_store(&lease->renewed_ns, even_clock_boot_ns());
  atomic_store(&lease->tried_ns, even_clock_boot_ns());
  return status;
}

static void free_lease(even_lease *lease) {
  (void)pthread_mutex_destroy(&lease->renewing);
  even_text_free(&lease->folder);
  even_text_free(&lease->path);
  even_text_free(&lease->unseen_path);
  even_text_free(&lease->text);
  even_free(lease);
}

static even_status is_shared(const char *folder, bool *out) {
  int fd = even_os.open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
  if (fd < 0) {
    return even_fail_errno(errno, "folder %s cannot be opened", folder);
  }
  *out = even_is_shared(fd);
  (void)even_os.close(fd);
  return EVEN_OK;
}

even_status even_lease_take(const even_lease_params *params, even_lease **out) {
  even_lease *lease = NULL;
  bool shared = false;
  *out = NULL;
  EVEN_TRY(is_shared(params->folder, &shared));
  if (!shared) {
    return EVEN_OK;
  }
  EVEN_TRY(EVEN_NEW(&lease));
  (void)pthread_mutex_init(&lease->renewing, NULL);
  even_status status = take(params, lease);
  if (status != EVEN_OK) {
    free_lease(lease);
    return status;
  }
  *out = lease;
  return EVEN_OK;
}

/* Some clients show what was set late, and some file systems count by seconds: half of the lease is waited. */
static void see_moves(even_lease *lease, const even_lease_look *now, uint64_t asked_ns) {
  if (lease->first_ns == 0) {
    lease->first = *now;
    lease->first_ns = asked_ns;
  }
  lease->moves = has_moved(&lease->first, now);
  if (!lease->moves && asked_ns - lease->first_ns >= EVEN_LEASE_NS / 2) {
    (void)even_os.rename(lease->path.data, lease->unseen_path.data); /* who works for it may look for it there */
    atomic_store(&lease->unseen, true);
  }
}

static void lose(even_lease *lease, const even_lease_look *now) {
  memcpy(lease->taker, now->text, sizeof lease->taker);
  atomic_store(&lease->lost, true);
}

/* With `renewing` held. */
static void look_anew(even_lease *lease) {
  even_error kept = *even_error_last();
  even_lease_look now;
  if (atomic_load(&lease->lost) || atomic_load(&lease->unseen)) {
    return;
  }
  uint64_t asked_ns = even_clock_boot_ns();
  atomic_store(&lease->tried_ns, asked_ns);
  even_status status = even_lease_look_at(lease->path.data, lease->text.data, &now);
  if (status == EVEN_OK && now.there && strcmp(now.text, lease->text.data) == 0) {
    atomic_store(&lease->renewed_ns, asked_ns);
    lease->missed = false;
    if (!lease->moves) {
      see_moves(lease, &now, asked_ns);
    }
  } else if (status == EVEN_OK) {
    bool late = asked_ns - atomic_load(&lease->renewed_ns) > EVEN_LEASE_NS;
    if (now.there || lease->missed || late) {
      lose(lease, &now);
    }
    lease->missed = true;
  }
  (void)even_error_restore(&kept);
}

void even_lease_renew(even_lease *lease) {
  if (pthread_mutex_trylock(&lease->renewing) == 0) { /* else the server keeps another one waiting */
    look_anew(lease);
    (void)pthread_mutex_unlock(&lease->renewing);
  }
}

even_status even_lease_check(even_lease *lease) {
  if (lease == NULL) {
    return EVEN_OK;
  }
  uint64_t now = even_clock_boot_ns();
  if (now - atomic_load(&lease->renewed_ns) > EVEN_LEASE_NS &&
      now - atomic_load(&lease->tried_ns) > EVEN_LEASE_RENEW_NS) {
    even_lease_renew(lease);
  }
  return atomic_load(&lease->lost) ? even_lease_tell_lost(lease->folder.data, lease->text.data, lease->taker) : EVEN_OK;
}

even_status even_lease_ask(even_lease *lease) {
  if (lease == NULL) {
    return EVEN_OK;
  }
  (void)pthread_mutex_lock(&lease->renewing);
  look_anew(lease);
  (void)pthread_mutex_unlock(&lease->renewing);
  return atomic_load(&lease->lost) ? even_lease_tell_lost(lease->folder.data, lease->text.data, lease->taker) : EVEN_OK;
}

bool even_lease_is_seen(const even_lease *lease) {
  return lease == NULL || !atomic_load(&lease->unseen);
}

even_status even_lease_follow(even_lease *lease, const char *folder) {
  if (lease == NULL) {
    return EVEN_OK;
  }
  (void)pthread_mutex_lock(&lease->renewing);
  even_status status = set_paths(lease, folder);
  (void)pthread_mutex_unlock(&lease->renewing);
  return status;
}

static void *keep(void *argument) {
  even_lease *lease = argument;
  while (atomic_load(&lease->ends) == 0) {
    even_futex_wait(&lease->ends, 0, EVEN_LEASE_RENEW_NS);
    if (atomic_load(&lease->ends) == 0) {
      even_lease_renew(lease);
    }
  }
  return NULL;
}

even_status even_lease_keep(even_lease *lease) {
  EVEN_TRY(even_thread_start(keep, lease, &lease->thread));
  lease->kept = true;
  return EVEN_OK;
}

static void remove_own(const even_lease *lease, const char *path) {
  even_lease_look now;
  if (even_lease_look_at(path, NULL, &now) == EVEN_OK && strcmp(now.text, lease->text.data) == 0) {
    (void)even_os.unlink(path);
  }
}

static void end_thread(even_lease *lease) {
  if (lease->kept) {
    atomic_store(&lease->ends, 1);
    even_futex_wake_all(&lease->ends);
    even_thread_join(lease->thread);
  }
}

void even_lease_leave(even_lease *lease) {
  if (lease != NULL) {
    end_thread(lease);
    free_lease(lease);
  }
}

void even_lease_release(even_lease *lease) {
  even_error kept = *even_error_last();
  if (lease == NULL) {
    return;
  }
  end_thread(lease);
  remove_own(lease, lease->path.data);
  if (atomic_load(&lease->unseen)) { /* renaming may have failed */
    remove_own(lease, lease->unseen_path.data);
  }
  free_lease(lease);
  (void)even_error_restore(&kept);
}
