/* Which checkpoint an attempt goes on from. */
#include "orchestrator/resume.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "checkpoint/reader.h"
#include "orchestrator/agent.h"
#include "orchestrator/host_memory.h"
#include "os/folder.h"
#include "os/path.h"

#include <string.h>

/* When a checkpoint was made and, where `lineage` is not NULL, of which training it is ("": it does not say). */
static even_status read_origin(const char *path, even_text *created, even_text *lineage) {
  even_checkpoint_info info;
  even_text_clear(created);
  even_status status = even_checkpoint_inspect(path, &info);
  if (status == EVEN_OK) {
    even_text_add(created, info.created);
    status = even_text_status(created);
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

/* What does not say who wrote it and lies in the folder before the job starts is another training's, or one that the
 * user chose to go back behind: a restart must not go on from it. With --resume auto it is this training's. */
even_status even_job_find_foreign(even_job *job) {
  char *path = NULL;
  if (job->params->checkpoint_folder == NULL || resumes_by_itself(job)) {
    return EVEN_OK;
  }
  EVEN_TRY(even_checkpoint_find_newest(job->params->checkpoint_folder, false, &path));
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
  /* times of one form, so that their order is that of the letters */
  if (lineage == NULL) { /* not by es.checkpoint */
    return writer == NULL && strcmp(info->created, even_text_string(&job->foreign)) > 0;
  }
  return job->began.length > 0 && strcmp(lineage, even_text_string(&job->lineage)) == 0 &&
         strcmp(info->created, even_text_string(&job->began)) <= 0;
}

static bool is_own(const void *context, const even_checkpoint_info *info) {
  return even_job_owns(context, info);
}

/* A training of which something is left, none of it whole, is not quietly begun anew. */
static even_status refuse_all_damaged(const even_job *job, const even_names *damaged) {
  (void)even_fail(EVEN_ERR_CORRUPT, "--resume auto: none of the %zu checkpoints in %s can be read whole: %s",
                  damaged->count, job->params->checkpoint_folder, damaged->items[0]);
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

/* Where there is a newer one elsewhere it is brought here, and *path is it. */
static even_status fetch_newer(even_job *job, bool restart, char **path) {
  even_text created = EVEN_TEXT_EMPTY;
  char *newer = NULL;
  even_status status = *path == NULL ? EVEN_OK : read_origin(*path, &created, NULL);
  if (status == EVEN_OK) {
    const even_agent_wish wish = {.folder = job->params->checkpoint_folder,
                                  .after = even_text_string(&created),
                                  .job = restart ? job->id : "",
                                  .lineage = even_text_string(&job->lineage),
                                  .until = even_text_string(&job->began)};
    status = job->params->elsewhere.fetch(job->params->elsewhere.context, &wish, &newer);
  }
  even_text_free(&created);
  if (status == EVEN_OK && newer != NULL) {
    even_free(*path);
    *path = newer;
  }
  return status;
}

/* A place that does not answer ends a job only where there is nothing else to go on from, and it would begin anew. */
static even_status look_elsewhere(even_job *job, bool restart, char **path) {
  even_status status = fetch_newer(job, restart, path);
  if (status == EVEN_OK || status == EVEN_ERR_INTERRUPTED || status == EVEN_ERR_MEMORY) {
    return status;
  }
  if (*path == NULL && !restart) {
    (void)even_error_prefix("--resume auto");
    return status;
  }
  even_job_notice(job, "warning: %s; the job goes on from what is here", even_error_last()->what);
  even_error_clear();
  return EVEN_OK;
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
  if (status == EVEN_OK && looks_elsewhere(job, restart, path, &damaged)) {
    status = look_elsewhere(job, restart, &path);
  }
  bool refuse = status == EVEN_OK && path == NULL && damaged.count > 0 && !restart;
  tell_damaged(job, &damaged, refuse ? 1 : 0);
  if (refuse) {
    status = refuse_all_damaged(job, &damaged);
  }
  even_names_free(&damaged);
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
                                .until = ""};
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

even_status even_job_find_resume(even_job *job, bool restart) {
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

const char *even_job_resume_place(const even_job *job) {
  return even_host_memory_has(job->params->memory, even_text_string(&job->resume)) ? " (in memory)" : "";
}
