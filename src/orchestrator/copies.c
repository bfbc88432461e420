/* What is new in the folder of checkpoints goes to other hosts, one checkpoint at a time. */
#include "orchestrator/copies.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "checkpoint/reader.h"
#include "orchestrator/bring.h"
#include "orchestrator/host_agent.h"
#include "os/clock.h"
#include "os/folder.h"

#include <evenstep/checkpoint.h>
#include <string.h>

static const uint64_t EACH_NS = 500000000u;

struct even_copies {
  uint64_t next_ns;
  uint64_t names;   /* the checksum of what was in the folder when it was looked at last */
  even_text newest; /* that was begun to be copied */
  size_t most;      /* hosts */
  bool under_way;
  uint64_t begun_ns;
  bool news;         /* how this one ends is told */
  bool told;         /* of any */
  bool failed;       /* the last one, on some host */
  bool failure_told; /* and how it failed */
};

void even_copies_close(even_copies *copies) {
  if (copies != NULL) {
    even_text_free(&copies->newest);
    even_free(copies);
  }
}

static even_status open_copies(even_hosts *hosts) {
  EVEN_TRY(EVEN_NEW(&hosts->copies));
  size_t others = even_hosts_count(hosts) - 1; /* a witness, the last, keeps none */
  hosts->copies->most = (size_t)hosts->params.copies < others ? (size_t)hosts->params.copies : others;
  return EVEN_OK;
}

/* Reading all manifests takes its time: only where names have come or gone. */
static bool has_changed(even_copies *copies, const char *folder) {
  even_names names = {NULL, 0};
  even_text text = EVEN_TEXT_EMPTY;
  if (even_folder_names(folder, &names) == EVEN_OK) {
    for (size_t i = 0; i < names.count; i++) {
      even_text_format(&text, "%s/", names.items[i]);
    }
  }
  even_names_free(&names);
  uint64_t sum = even_checkpoint_checksum(even_text_string(&text), text.length);
  bool changed = text.length > 0 && sum != copies->names;
  copies->names = sum;
  even_text_free(&text);
  return changed;
}

static even_status find_new(const even_job *job, char **path) {
  even_checkpoint_info info;
  EVEN_TRY(even_checkpoint_find_newest(job->params->checkpoint_folder, false, path));
  if (*path == NULL) {
    return EVEN_OK;
  }
  even_status status = even_checkpoint_inspect(*path, &info);
  bool own = status == EVEN_OK && even_job_owns(job, &info);
  even_checkpoint_info_free(&info);
  if (!own) {
    even_free(*path);
    *path = NULL;
  }
  return status;
}

/* Told once, until it goes well again. */
static void tell_failure(even_job *job, const even_host_agent *agent, const even_error *why) {
  even_copies *copies = job->hosts->copies;
  if (!copies->failure_told) {
    even_job_notice(job, "host %s has no copy of the newest checkpoint: %.300s (the next one is tried anew)",
                    agent->name, why->what);
  }
  copies->failed = copies->failure_told = true;
}

static void begin(even_job *job, const char *path) {
  even_copies *copies = job->hosts->copies;
  even_text_clear(&copies->newest);
  even_text_add(&copies->newest, path);
  copies->under_way = true;
  copies->news = !copies->told || copies->failed;
  copies->failed = false;
  copies->begun_ns = even_clock_ns();
  for (size_t i = 1; i <= copies->most; i++) {
    even_host_agent *agent = &job->hosts->agents[i];
    if (agent->link != NULL && even_bring_begin(job, agent, path, true) != EVEN_OK) {
      tell_failure(job, agent, even_error_last());
      even_bring_drop(agent);
      even_error_clear();
    }
  }
}

static void tell_copy(even_job *job, const even_host_agent *agent) {
  const even_copies *copies = job->hosts->copies;
  const char *slash = strrchr(even_text_string(&copies->newest), '/');
  const char *name = slash == NULL ? "it" : slash + 1;
  if (copies->news && even_bring_was_sent(agent)) {
    even_job_notice(job, "host %s has a copy of %s, sent in %.1f s; newer ones follow", agent->name, name,
                    (double)(even_clock_ns() - copies->begun_ns) / 1e9);
  } else if (copies->news) {
    even_job_notice(job, "host %s has %s already: where it sees this folder, there are no copies on it", agent->name,
                    name);
  }
}

/* Each host has it, or cannot. */
static void look(even_job *job) {
  even_copies *copies = job->hosts->copies;
  for (size_t i = 1; i <= copies->most; i++) {
    if (even_bring_state(&job->hosts->agents[i], NULL) == EVEN_BRING_UNDER_WAY) {
      return;
    }
  }
  copies->under_way = false;
  for (size_t i = 1; i <= copies->most; i++) {
    const even_host_agent *agent = &job->hosts->agents[i];
    const even_error *why = NULL;
    switch (even_bring_state(agent, &why)) {
      case EVEN_BRING_FAILED:
        tell_failure(job, agent, why);
        break;
      case EVEN_BRING_HOLDS:
        tell_copy(job, agent);
        copies->told = true;
        break;
      default:
        break;
    }
  }
  copies->failure_told = copies->failed;
}

void even_copies_tick(even_job *job) {
  even_hosts *hosts = job->hosts;
  uint64_t now = even_clock_ns();
  char *path = NULL;
  if (hosts->params.copies == 0 || job->params->checkpoint_folder == NULL || job->alive == 0) {
    return; /* between attempts what a restart needs is sent */
  }
  if (hosts->copies == NULL && open_copies(hosts) != EVEN_OK) {
    even_error_clear(); /* again with the next tick */
    return;
  }
  if (hosts->copies->under_way) {
    look(job);
  }
  if (hosts->copies->under_way || now < hosts->copies->next_ns) {
    return;
  }
  hosts->copies->next_ns = now + EACH_NS;
  if (has_changed(hosts->copies, job->params->checkpoint_folder) && find_new(job, &path) == EVEN_OK && path != NULL &&
      strcmp(path, even_text_string(&hosts->copies->newest)) != 0) {
    begin(job, path);
  }
  even_free(path);
  even_error_clear(); /* what cannot be read now is looked at again when a name comes */
}
