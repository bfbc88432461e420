/* The run folder: its name, and what happens to one of that name. */
#include "base/alloc.h"
#include "base/fail.h"
#include "base/utf8.h"
#include "cli/command.h"
#include "cli/job_setup.h"
#include "orchestrator/environment.h"
#include "orchestrator/estate.h"
#include "orchestrator/legacy.h"
#include "os/clock.h"
#include "os/file.h"
#include "os/folder.h"
#include "os/lease.h"
#include "os/lock_holder.h"
#include "os/locks.h"
#include "os/path.h"
#include "os/pipe.h"
#include "os/random.h"

#include <string.h>
#include <time.h>

enum { MOST_NAME_BYTES = 200 }; /* of the 255 of a name: more is made beside it */
enum { TIME_AND_NUMBER = 24 };  /* "-20261201-173000", ".1", ".2" … */
enum { MOST_SCRIPT_BYTES = MOST_NAME_BYTES - TIME_AND_NUMBER };

static bool is_control(char byte) {
  return (unsigned char)byte < ' ' || byte == '\177';
}

/* "examples/char_gpt.py" -> "char_gpt". Whatever the script is called: a name that --name takes, too (check_bytes). */
static void add_script_name(even_text *out, const char *script) {
  char clean[MOST_SCRIPT_BYTES + 1];
  const char *slash = strrchr(script, '/');
  const char *name = slash == NULL || slash[1] == '\0' ? script : slash + 1;
  size_t length = strlen(name);
  if (length > 3 && strcmp(name + length - 3, ".py") == 0) {
    length -= 3;
  }
  length = length < MOST_SCRIPT_BYTES ? length : MOST_SCRIPT_BYTES;
  memcpy(clean, name, length);
  clean[length] = '\0';
  if (length == MOST_SCRIPT_BYTES) {
    even_utf8_trim(clean);
  }
  for (char *at = clean; *at != '\0'; at++) {
    *at = is_control(*at) || *at == '/' || (at == clean && *at == '.') ? '_' : *at;
  }
  even_text_add(out, clean);
}

static even_status default_name(const char *script, even_text *out) {
  char when[32];
  time_t now = (time_t)(even_clock_wall_ns() / 1000000000u);
  struct tm parts;
  (void)localtime_r(&now, &parts);
  (void)strftime(when, sizeof when, "%Y%m%d-%H%M%S", &parts);
  add_script_name(out, script);
  even_text_format(out, "-%s", when);
  return even_text_status(out);
}

static even_status set_path(even_job_setup *setup, const even_job_options *options, int number) {
  even_text_clear(&setup->run_folder);
  even_text_format(&setup->run_folder, "%s/%s", options->runs_folder, setup->run_name.data);
  if (number > 0) {
    even_text_format(&setup->run_folder, ".%d", number);
  }
  return even_text_status(&setup->run_folder);
}

/* With its sign, until it has its new name: else another host's job could have the old one meanwhile. */
static even_status move_away(even_job_setup *setup) {
  const char *path = setup->run_folder.data;
  even_text other = EVEN_TEXT_EMPTY;
  even_status status = EVEN_OK;
  int number = 1;
  do {
    even_text_clear(&other);
    even_text_format(&other, "%s.%d", path, number++);
    status = even_text_status(&other);
  } while (status == EVEN_OK && even_path_exists(other.data));
  if (status == EVEN_OK) {
    status = even_folder_rename(path, other.data);
  }
  if (status == EVEN_OK) {
    status = even_lease_follow(setup->lease, other.data);
  }
  even_text_free(&other);
  return status;
}

/* Two jobs of one script in one second: the second is called NAME.1. */
static even_status make_unnamed(const even_job_options *options, const char *script, even_job_setup *setup) {
  even_status status = default_name(script, &setup->run_name);
  for (int number = 0; status == EVEN_OK; number++) {
    status = set_path(setup, options, number);
    if (status == EVEN_OK) {
      status = even_folder_create(setup->run_folder.data);
      if (status != EVEN_ERR_IN_USE) {
        break;
      }
      status = EVEN_OK;
    }
  }
  if (status == EVEN_OK) {
    even_text_clear(&setup->run_name);
    even_text_add(&setup->run_name, even_path_name(setup->run_folder.data));
    status = even_text_status(&setup->run_name);
  }
  return status;
}

/* That of an agent that was killed is no more, and its folder this one's. */
static bool goes_on(const even_job_options *options) {
  return options->legacy != NULL && even_legacy_run_name(options->legacy) != NULL;
}

/* It stands in lines for people and programs, and beside others with something behind it (NAME.1). */
static even_status check_bytes(const char *name) {
  for (const char *at = name; *at != '\0'; at++) {
    if (is_control(*at)) {
      (void)even_fail(EVEN_ERR_USAGE, "--name has a control character as its byte %zu (0x%02x)",
                      (size_t)(at - name) + 1, (unsigned)(unsigned char)*at);
      return even_error_fix("give a name of one line: letters, digits, what a terminal shows");
    }
  }
  if (strlen(name) > MOST_NAME_BYTES) {
    (void)even_fail(EVEN_ERR_USAGE, "--name has %zu bytes", strlen(name));
    return even_error_fix("give a name of at most %d", MOST_NAME_BYTES);
  }
  return EVEN_OK;
}

even_status even_job_check_name(const even_job_options *options) {
  if (options->name == NULL || goes_on(options)) { /* else its folder is there, whatever it is called */
    return EVEN_OK;
  }
  if (options->name[0] == '\0' || options->name[0] == '.' || strchr(options->name, '/') != NULL) {
    even_status status = even_fail(EVEN_ERR_USAGE, "--name \"%s\" is no name for a folder", options->name);
    (void)even_error_fix("give a name without '/' that does not begin with '.'; --runs-dir says where it is made");
    return status;
  }
  return check_bytes(options->name);
}

/* A file system without locks (Lustre mounted without them, some of FUSE) cannot tell whether a job lives: the file
 * that a living one keeps there must do, as it does for `evenstep top`. */
static even_status check_unlocked(const even_job_setup *setup) {
  even_text file = EVEN_TEXT_EMPTY;
  even_text_format(&file, "%s/agent.json", setup->run_folder.data);
  even_status status = even_text_status(&file);
  if (status == EVEN_OK && even_path_exists(file.data)) {
    status = even_fail(EVEN_ERR_IN_USE,
                       "run folder %s may belong to a job that is running: it holds agent.json, and its "
                       "file system has no locks that would tell",
                       setup->run_folder.data);
    (void)even_error_fix("choose another --name, end that job first, or where none runs remove %s", file.data);
  }
  even_text_free(&file);
  return status;
}

static even_status tell_in_use(const char *folder) {
  even_text who = EVEN_TEXT_EMPTY;
  even_lock_add_holder(folder, true, &who);
  (void)even_fail(EVEN_ERR_IN_USE, "run folder %s belongs to a job that is running%s%s", folder,
                  who.length > 0 ? " on " : "", even_text_string(&who));
  even_text_free(&who);
  return even_error_fix("choose another --name, or end that job first");
}

/* Among jobs of this host. */
static even_status lock_here(const even_job_options *options, even_job_setup *setup) {
  const char *folder = setup->run_folder.data;
  int held = even_legacy_lock(options->legacy);
  even_status locked = held < 0 ? EVEN_OK : even_folder_lock_again(folder, held, &setup->lock);
  if (locked == EVEN_OK && setup->lock < 0) { /* nobody has, or of another folder */
    locked = even_folder_lock(folder, &setup->lock);
  }
  if (locked == EVEN_ERR_UNSUPPORTED) {
    even_error_clear(); /* the job runs without */
    return goes_on(options) ? EVEN_OK : check_unlocked(setup);
  }
  EVEN_TRY(locked);
  return setup->lock < 0 ? tell_in_use(folder) : EVEN_OK;
}

static even_status start_lease(const even_job_options *options, even_job_setup *setup) {
  const even_estate *estate = options->estate;
  const even_lease_params params = {.folder = setup->run_folder.data,
                                    .owner = setup->id,
                                    .turn = estate == NULL ? 0 : estate->generation,
                                    .patient = estate == NULL, /* nobody waits for a leader that waits */
                                    .tell = even_cli_say};
  EVEN_TRY(even_lease_take(&params, &setup->lease));
  even_status status = setup->lease == NULL ? EVEN_OK : even_lease_keep(setup->lease);
  if (status != EVEN_OK) {
    even_lease_release(setup->lease);
    setup->lease = NULL;
  }
  return status;
}

void even_job_tell_unseen(const even_job_setup *setup, const char *why, void (*tell)(void *context, const char *text),
                          void *context) {
  even_text words = EVEN_TEXT_EMPTY;
  even_text_format(&words, "jobs of other hosts do not see that run folder %s is in use (%s): start none of that name",
                   setup->run_folder.data, why);
  tell(context, even_text_string(&words));
  even_text_free(&words);
}

/* Among those of other hosts. Where no sign can be made the job runs as without other hosts. */
static even_status lock_there(const even_job_options *options, even_job_setup *setup) {
  even_status status = start_lease(options, setup);
  if (status == EVEN_OK || status == EVEN_ERR_IN_USE || status == EVEN_ERR_INTERRUPTED) {
    return status;
  }
  const even_error why = *even_error_last();
  even_job_tell_unseen(setup, why.what, even_cli_say, NULL);
  even_error_clear();
  return EVEN_OK;
}

static void unlock(even_job_setup *setup) {
  even_lease_release(setup->lease);
  even_folder_unlock(setup->lock);
  setup->lease = NULL;
  setup->lock = -1;
}

void even_job_leave_folder(even_job_setup *setup) {
  if (!even_legacy_has_asked(setup->legacy)) {
    unlock(setup);
    return;
  }
  even_lease_leave(setup->lease);
  even_pipe_close(setup->lock);
  setup->lease = NULL;
  setup->lock = -1;
}

static even_status lock(const even_job_options *options, even_job_setup *setup) {
  EVEN_TRY(lock_here(options, setup));
  even_status status = lock_there(options, setup);
  if (status != EVEN_OK) {
    unlock(setup);
  }
  return status;
}

/* That of the leader that is gone, where this host has its logs; one that sees the same folder, and still lives (it may
 * be cut off), keeps it: then NAME.1. */
static even_status share_folder(const even_job_options *options, even_job_setup *setup) {
  for (int number = 0;; number++) {
    EVEN_TRY(set_path(setup, options, number));
    EVEN_TRY(even_folder_make(setup->run_folder.data));
    even_status status = lock(options, setup);
    if (status != EVEN_ERR_IN_USE) {
      return status;
    }
    even_error_clear();
  }
}

static even_status choose_id(const even_job_options *options, char *out) {
  const char *before = options->estate != NULL   ? even_estate_text(options->estate, "job")
                       : options->legacy != NULL ? even_legacy_job_id(options->legacy)
                                                 : NULL;
  if (before == NULL || strlen(before) != EVEN_JOB_ID) {
    return even_random_hex(out, EVEN_JOB_ID);
  }
  memcpy(out, before, EVEN_JOB_ID + 1);
  return EVEN_OK;
}

static even_status open_folder(const even_job_options *options, const char *script, even_job_setup *setup) {
  EVEN_TRY(choose_id(options, setup->id));
  EVEN_TRY(even_folder_make(options->runs_folder));
  if (options->name == NULL) {
    EVEN_TRY(make_unnamed(options, script, setup));
    return lock(options, setup);
  }
  even_text_add(&setup->run_name, options->name);
  EVEN_TRY(even_text_status(&setup->run_name));
  EVEN_TRY(set_path(setup, options, 0));
  if (options->estate != NULL) {
    return share_folder(options, setup);
  }
  if (even_path_exists(setup->run_folder.data)) {
    EVEN_TRY(lock(options, setup));
    if (options->resume != NULL || goes_on(options)) {
      return EVEN_OK;
    }
    EVEN_TRY(move_away(setup));
    unlock(setup);
  }
  EVEN_TRY(even_folder_make(setup->run_folder.data));
  return lock(options, setup);
}

even_status even_job_set_sign(even_job_setup *setup) {
  even_text folder = EVEN_TEXT_EMPTY;
  if (setup->lease == NULL) {
    return EVEN_OK;
  }
  even_status status = even_path_absolute(setup->run_folder.data, &folder);
  if (status == EVEN_OK) {
    status = even_environment_set(&setup->environment, "EVENSTEP_RUN_SIGN", folder.data);
  }
  even_text_free(&folder);
  return status;
}

even_status even_job_run_folder(const even_job_options *options, const char *script, even_job_setup *setup) {
  setup->legacy = options->legacy;
  even_status status = open_folder(options, script, setup);
  if (status == EVEN_OK && setup->lock >= 0 && !even_is_shared(setup->lock)) { /* there the lease says whose it is */
    even_legacy_keep_lock(options->legacy, setup->lock);
  }
  if (status != EVEN_OK && even_error_last()->fix[0] == '\0') {
    (void)even_error_fix("--runs-dir DIR names a folder that you may write to");
  }
  return status;
}
