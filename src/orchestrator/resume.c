/* Which checkpoint an attempt goes on from. */
#include "orchestrator/resume.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/stop.h"
#include "checkpoint/reader.h"
#include "orchestrator/agent.h"
#include "orchestrator/bring_back.h"
#include "orchestrator/copies.h"
#include "orchestrator/host_agent.h"
#include "orchestrator/host_memory.h"
#include "orchestrator/succession.h"
#include "os/clock.h"
#include "os/folder.h"
#include "os/path.h"

#include <string.h>

/* Between two questions to a place that does not answer: 5 s. */
enum { PAUSE_TURNS = 100 };

static const uint64_t TURN_NS = 50000000u;

/* Its place among others (info.order) and, where `lineage` is not NULL, of which training it is ("": it does not say).
 */
static even_status read_origin(const char *path, even_text *order, even_text *lineage) {
  even_checkpoint_info info;
  even_text_clear(order);
  even_status status = even_checkpoint_inspect(path, &info);
  if (status == EVEN_OK) {
    even_text_add(order, info.order);
    status = even_text_status(order);
  }
  if (status == EVEN_OK && lineage != NULL) {
    const char *name = json_string_value(json_object_get(info.state, "lineage"));
    even_text_clear(lineage);
    even_text_add(lineage, name == NULL ? "" : name);
    status = even_text_status(lineage);
  }
  even_checkpoint_info_free(&info);
  return status;
}

static bool resumes_by_itself(const even_job *job) {
  return job->params->resume != NULL && strcmp(job->params->resume, "auto") == 0;
}

/* As es.checkpoint never is. */
static bool names_nobody(const void *context, const even_checkpoint_info *info) {
  (void)context;
  return json_object_get(info->state, "job") == NULL && json_object_get(info->state, "lineage") == NULL;
}

/* What does not say who wrote it and lies in the folder before the job starts is another training's, or one that the
 * user chose to go back behind: a restart must not go on from it. With --resume auto it is this training's. */
even_status even_job_find_foreign(even_job *job) {
  char *path = NULL;
  if (job->params->checkpoint_folder == NULL || resumes_by_itself(job)) {
    return EVEN_OK;
  }
  EVEN_TRY(even_checkpoint_find_newest_of(job->params->checkpoint_folder, names_nobody, NULL, &path));
  even_status status = path == NULL ? EVEN_OK : read_origin(path, &job->foreign, NULL);
  even_free(path);
  return status;
}

/* Whether a restart may go on from it. Other jobs may write into the same folder meanwhile, so the job's own is what
 * names the job; with --resume auto, also what its training had before. */
bool even_job_owns(const even_job *job, const even_checkpoint_info *info) {
  const char *writer = json_string_value(json_object_get(info->state, "job"));
  const char *lineage = json_string_value(json_object_get(info->state, "lineage"));
  if (writer != NULL && strcmp(writer, job->id) == 0) {
    return true;
  }
  if (lineage == NULL) {
    return writer == NULL && strcmp(info->order, even_text_string(&job->foreign)) > 0;
  }
  return job->began.length > 0 && strcmp(lineage, even_text_string(&job->lineage)) == 0 &&
         strcmp(info->order, even_text_string(&job->began)) <= 0;
}

static bool is_own(const void *context, const even_checkpoint_info *info) {
  return even_job_owns(context, info);
}

/* A training of which something is left, none of it whole, is not quietly begun anew. */
static even_status refuse_all_damaged(const even_job *job, bool restart, const even_names *damaged) {
  (void)even_fail(EVEN_ERR_CORRUPT, "%snone of the %zu checkpoints in %s can be read whole: %s",
                  restart ? "" : "--resume auto: ", damaged->count, job->params->checkpoint_folder, damaged->items[0]);
  return even_error_fix(
      "`evenstep ckpt verify` names every damage; --resume PATH goes on from a checkpoint elsewhere, without --resume "
      "training begins anew");
}

/* Whether what was uploaded is worth a look: a job that begins may be on another machine than its last part, and so is
 * one that goes on under another leader; later all that is there came from here, unless a disk has lost it. */
static bool looks_elsewhere(const even_job *job, bool restart, const char *found, const even_names *damaged) {
  return job->params->elsewhere.kept && job->params->checkpoint_folder != NULL &&
         (!restart || job->params->estate != NULL || found == NULL || damaged->count > 0);
}

/* Agents of other hosts, and who looks at the page, wait meanwhile. */
static void look_after(void *context) {
  even_job *job = context;
  if (job->hosts != NULL && job->hosts->job == job && even_loop_turn(&job->hosts->loop, 0) == EVEN_OK) {
    even_hosts_tick(job->hosts);
  }
  even_error_clear(); /* whoever turns it next hears of it again */
  if (job->params->observer.tick != NULL) {
    job->params->observer.tick(job->params->observer.context);
  }
}

/* Where there is a newer one elsewhere it is brought here, and *path is it. */
static even_status fetch_newer(even_job *job, bool restart, char **path) {
  even_text order = EVEN_TEXT_EMPTY;
  char *newer = NULL;
  even_status status = *path == NULL ? EVEN_OK : read_origin(*path, &order, NULL);
  if (status == EVEN_OK) {
    const even_agent_wish wish = {.folder = job->params->checkpoint_folder,
                                  .after = even_text_string(&order),
                                  .job = restart ? job->id : "",
                                  .lineage = even_text_string(&job->lineage),
                                  .until = even_text_string(&job->began),
                                  .meanwhile = look_after,
                                  .meanwhile_context = job};
    status = job->params->elsewhere.fetch(job->params->elsewhere.context, &wish, &newer);
  }
  even_text_free(&order);
  if (status == EVEN_OK && newer != NULL) {
    even_free(*path);
    *path = newer;
  }
  return status;
}

static bool ends_the_looking(even_status status) {
  return status == EVEN_OK || status == EVEN_ERR_INTERRUPTED || status == EVEN_ERR_MEMORY;
}

static even_status pause_before_asking(even_job *job) {
  for (int i = 0; i < PAUSE_TURNS; i++) {
    EVEN_TRY(even_succession_refuse_superseded(job->hosts));
    if (even_stop_asked()) {
      return even_fail(EVEN_ERR_INTERRUPTED, "interrupted while a place with checkpoints was waited for");
    }
    look_after(job);
    even_clock_sleep_ns(TURN_NS);
  }
  return EVEN_OK;
}

/* Steps that may be there alone are not made again unasked. */
static even_status refuse_to_begin_anew(even_job *job, even_status why) {
  (void)even_error_prefix(
      "no checkpoint of the job is left here, and it is not begun anew while another place may have "
      "one");
  const even_error refusal = *even_error_last();
  even_job_notice(job,
                  "the job ends: once that place answers, --name NAME --resume auto goes on from there; without "
                  "--resume training begins anew");
  (void)even_error_restore(&refusal);
  return why;
}

/* A restart that has lost what was here: for a while a place that does not answer is asked again. */
static even_status ask_again(even_job *job, even_status status, char **path) {
  double patience = job->params->elsewhere.patience_seconds;
  uint64_t since_ns = even_clock_ns();
  bool told = false;
  while (!ends_the_looking(status) && status != EVEN_ERR_CORRUPT &&
         (double)(even_clock_ns() - since_ns) * 1e-9 < patience) {
    if (!told) {
      even_job_notice(job, "warning: no checkpoint of the job is left here, and %s; that place is asked again for %g s",
                      even_error_last()->what, patience);
      told = true;
    }
    even_error_clear();
    EVEN_TRY(pause_before_asking(job));
    status = fetch_newer(job, true, path);
  }
  return ends_the_looking(status) ? status : refuse_to_begin_anew(job, status);
}

/* Whether checkpoints may have been written: its ranks have met in this attempt or an earlier one, or it began from
 * one. */
static bool may_have_saved(even_job *job) {
  job->trained = job->trained || job->began.length > 0 || job->params->estate != NULL || job->progress.reader == NULL;
  for (size_t i = 0; i < job->progress.count; i++) {
    job->trained = job->trained || job->progress.ranks[i].joined;
  }
  return job->trained;
}

/* A place that does not answer ends a job only where there is nothing else to go on from, and it would begin anew. */
static even_status look_elsewhere(even_job *job, bool restart, char **path) {
  even_status status = fetch_newer(job, restart, path);
  if (ends_the_looking(status)) {
    return status;
  }
  if (*path == NULL && !restart) {
    (void)even_error_prefix("--resume auto");
    return status;
  }
  if (*path == NULL && may_have_saved(job)) {
    return ask_again(job, status, path);
  }
  even_job_notice(job, "warning: %s; the job goes on from what is here", even_error_last()->what);
  even_error_clear();
  return EVEN_OK;
}

/* It goes once what the job goes on from has come there. */
static void leave_newer(even_job *job, const char *order) {
  for (const even_copy *copy = even_copies_newer(job, order); copy != NULL; copy = even_copies_newer(job, order)) {
    const char *host = even_text_string(&copy->host);
    const char *there = even_text_string(&copy->folder);
    even_job_notice(job,
                    "warning: host %s has a copy of %s (%s there), which is newer than all that is whole here; it "
                    "goes once what the job goes on from has come there",
                    host, even_path_name(there), there);
    even_copies_miss(job, host);
  }
}

/* What hosts that are here have and is newer is here by now. Of a restart: steps that are in a copy on one that is lost
 * are not made again unasked, nor some of them without a word; what is no newer its host still has. `path`: the newest
 * that is whole here; NULL: none is. */
static even_status look_at_copies(even_job *job, const char *path) {
  const even_copy *copy = even_copies_newest(job);
  even_text order = EVEN_TEXT_EMPTY;
  if (copy == NULL) {
    return EVEN_OK;
  }
  if (path == NULL) {
    return even_bring_back_refuse_anew(job, even_text_string(&copy->host), even_text_string(&copy->folder),
                                       ", and is not here");
  }
  even_status status = read_origin(path, &order, NULL);
  if (status == EVEN_OK) {
    leave_newer(job, even_text_string(&order));
  }
  even_text_free(&order);
  return status;
}

/* Where another host has a newer one (--checkpoint-copies, --checkpoint-memory), it is brought here, and *path is it.
 * A job that begins takes another training's only where nothing is here. */
static even_status look_at_hosts(even_job *job, bool restart, char **path) {
  even_text order = EVEN_TEXT_EMPTY;
  even_text lineage = EVEN_TEXT_EMPTY;
  char *newer = NULL;
  even_status status = *path == NULL ? EVEN_OK : read_origin(*path, &order, &lineage);
  if (status == EVEN_OK) {
    const char *went_on_with = job->began.length > 0 ? even_text_string(&job->lineage) : "";
    const even_bring_back_wish wish = {.after = even_text_string(&order),
                                       .here = *path,
                                       .job = restart ? job->id : "",
                                       .lineage = restart ? went_on_with : even_text_string(&lineage),
                                       .until = restart ? even_text_string(&job->began) : "",
                                       .any = !restart && *path == NULL,
                                       .trained = !restart || may_have_saved(job)};
    status = even_bring_back_newest(job, &wish, &newer);
  }
  even_text_free(&order);
  even_text_free(&lineage);
  if (newer != NULL) {
    even_free(*path);
    *path = newer;
  }
  return status;
}

/* What hosts could not give the place elsewhere may have: only where it has nothing is that how the job ends. */
static even_status look_elsewhere_instead(even_job *job, bool restart, char **path) {
  const even_error hosts = *even_error_last();
  even_error_clear();
  even_status status = look_elsewhere(job, restart, path);
  if (status == EVEN_ERR_INTERRUPTED || status == EVEN_ERR_MEMORY) {
    return status;
  }
  if (*path != NULL) {
    even_job_notice(job, "warning: %.400s; the job goes on from what another place had", hosts.what);
    return status;
  }
  if (status != EVEN_OK) {
    even_job_notice(job, "warning: %.400s", even_error_last()->what);
  }
  return even_error_restore(&hosts);
}

static void tell_damaged(even_job *job, const even_names *damaged, size_t first) {
  for (size_t i = first; i < damaged->count; i++) {
    even_job_notice(job, "passed over: %s", damaged->items[i]);
  }
}

/* The newest whole checkpoint, every checksum compared: the ranks read it next anyway, from memory then. */
static even_status find_newest(even_job *job, bool restart) {
  char *path = NULL;
  const char *folders[2];
  size_t count = 0;
  even_names damaged = {NULL, 0};
  if (job->params->checkpoint_folder != NULL) {
    folders[count++] = job->params->checkpoint_folder;
  }
  if (restart && job->params->memory != NULL) {
    folders[count++] = even_text_string(&job->params->memory->folder);
  }
  even_status status = even_checkpoint_find_whole_of(folders, count, restart ? is_own : NULL, job, &damaged, &path);
  bool elsewhere = status == EVEN_OK && looks_elsewhere(job, restart, path, &damaged);
  if (status == EVEN_OK) {
    status = look_at_hosts(job, restart, &path);
  }
  const bool theirs_damaged = path == NULL && status == EVEN_ERR_CORRUPT;
  if (status == EVEN_OK && elsewhere) {
    status = look_elsewhere(job, restart, &path);
  } else if (elsewhere && path == NULL &&
             (theirs_damaged || status == EVEN_ERR_NOT_FOUND || status == EVEN_ERR_PEER_LOST) &&
             !even_succession_is_superseded(job->hosts)) {
    status = look_elsewhere_instead(job, restart, &path);
  }
  bool refuse = path == NULL && damaged.count > 0 &&
                ((status == EVEN_OK && !restart) || (theirs_damaged && status == EVEN_ERR_CORRUPT));
  tell_damaged(job, &damaged, refuse ? 1 : 0);
  if (refuse) {
    status = refuse_all_damaged(job, restart, &damaged);
  }
  even_names_free(&damaged);
  if (status == EVEN_OK && restart) {
    status = look_at_copies(job, path);
  }
  if (status == EVEN_OK && path != NULL && !restart) {
    status = read_origin(path, &job->began, &job->lineage);
  }
  if (status == EVEN_OK && path != NULL) {
    status = even_path_absolute(path, &job->resume);
  }
  even_free(path);
  return status;
}

/* The user's own, from another place: fetched once, and again only where that is gone. */
static even_status fetch_named(even_job *job, const char *url) {
  char *path = NULL;
  const even_agent_wish wish = {.url = url,
                                .folder = job->params->checkpoint_folder == NULL ? even_text_string(&job->run_folder)
                                                                                 : job->params->checkpoint_folder,
                                .after = "",
                                .job = "",
                                .lineage = "",
                                .until = "",
                                .meanwhile = look_after,
                                .meanwhile_context = job};
  if (job->fetched.length > 0 && even_path_is_folder(job->fetched.data)) {
    return EVEN_OK;
  }
  if (job->params->elsewhere.fetch == NULL) {
    return even_fail(EVEN_ERR_ARGUMENT, "a checkpoint of another place is wanted, and nobody can fetch it");
  }
  even_status status = job->params->elsewhere.fetch(job->params->elsewhere.context, &wish, &path);
  if (status == EVEN_OK && path == NULL) {
    even_text shown = EVEN_TEXT_EMPTY;
    even_text_add_shown(&shown, url);
    status = even_fail(EVEN_ERR_NOT_FOUND, "%s holds no whole checkpoint", even_text_string(&shown));
    even_text_free(&shown);
  }
  if (status == EVEN_OK) {
    even_text_clear(&job->fetched);
    even_text_add(&job->fetched, path);
    status = even_text_status(&job->fetched);
  } else {
    (void)even_error_prefix("--resume");
  }
  even_free(path);
  return status;
}

/* Whatever the ranks of the next attempt write is newer than all that lies here, and than what earlier attempts have
 * written, wherever that is. */
static even_status count_turn(even_job *job) {
  job->resume_step = -1;
  const char *folders[] = {job->params->checkpoint_folder,
                           job->params->memory == NULL ? NULL : even_text_string(&job->params->memory->folder),
                           job->resume.length == 0 ? NULL : job->resume.data};
  for (size_t i = 0; i < sizeof folders / sizeof folders[0]; i++) {
    even_checkpoint_info info = {.turn = 0};
    char *path = NULL;
    bool named = folders[i] == job->resume.data;
    if (folders[i] == NULL) {
      continue;
    }
    even_status status = named ? EVEN_OK : even_checkpoint_find_newest(folders[i], false, &path);
    if (status == EVEN_OK && (named || path != NULL)) {
      status = even_checkpoint_inspect(named ? folders[i] : path, &info);
      job->turn = info.turn > job->turn ? info.turn : job->turn;
      job->resume_step = named ? info.step : job->resume_step;
      even_checkpoint_info_free(&info);
    }
    even_free(path);
    EVEN_TRY(status);
  }
  job->turn++;
  return EVEN_OK;
}

static even_status find_resume(even_job *job, bool restart) {
  const char *wish = job->params->resume;
  bool named = wish != NULL && !resumes_by_itself(job);
  even_checkpoint_info info;
  even_text_clear(&job->resume);
  if (restart || (wish != NULL && !named)) {
    EVEN_TRY(find_newest(job, restart));
  }
  if (job->resume.length > 0 || !named) {
    return EVEN_OK;
  }
  if (even_path_is_url(wish)) {
    EVEN_TRY(fetch_named(job, wish));
    wish = job->fetched.data;
  }
  even_status status =
      even_checkpoint_inspect(wish, &info); /* the user's, and still the newest where none was written */
  even_checkpoint_info_free(&info);
  return status == EVEN_OK ? even_path_absolute(wish, &job->resume) : status;
}

/* Whoever mistyped the run's name learns it now, and not from the loss. */
static void tell_beginning(even_job *job) {
  const char *folder = job->params->checkpoint_folder;
  if (job->resume.length > 0) {
    even_job_notice(job, "training begins from %s (--resume)", job->resume.data);
  } else {
    even_job_notice(job, "training begins anew: --resume auto found no checkpoint in %s",
                    folder == NULL ? "the run's folder" : folder);
  }
}

even_status even_job_find_resume(even_job *job, bool restart) {
  EVEN_TRY(find_resume(job, restart));
  EVEN_TRY(count_turn(job));
  if (!restart && job->params->resume != NULL) {
    tell_beginning(job);
  }
  return EVEN_OK;
}

const char *even_job_resume_place(const even_job *job) {
  return even_host_memory_has(job->params->memory, even_text_string(&job->resume)) ? " (in memory)" : "";
}
