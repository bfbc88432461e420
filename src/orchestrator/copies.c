/* What is new among the job's checkpoints goes to other hosts, one checkpoint at a time. */
#include "orchestrator/copies.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_reader.h"
#include "checkpoint/reader.h"
#include "orchestrator/bring.h"
#include "orchestrator/host_agent.h"
#include "orchestrator/host_memory.h"
#include "orchestrator/succession.h"
#include "os/clock.h"
#include "os/folder.h"
#include "os/path.h"

#include <evenstep/checkpoint.h>
#include <string.h>

static const uint64_t EACH_NS = 500000000u;

/* One kind of copies. */
typedef struct copies_of {
  bool memory;       /* they lie in hosts' memory; else on disks */
  size_t most;       /* hosts */
  uint64_t names;    /* the checksum of what was in the folders when they were looked at last */
  even_text newest;  /* that was begun to be copied, */
  even_text order;   /* and info.order of it */
  bool news;         /* how this one ends is told */
  bool told;         /* of any */
  bool failed;       /* the last one, on some host */
  bool failure_told; /* and how it failed */
  bool anew;         /* whoever lacks it gets it, also where there is no newer one */
} copies_of;

struct even_copies {
  bool opened; /* for the hosts that there are */
  uint64_t next_ns;
  copies_of kinds[2];
  copies_of *now; /* of which one is under way; NULL: of none */
  size_t turn;    /* the kind that was looked at last */
  uint64_t begun_ns;
  uint64_t sent_bytes;
  uint64_t spared_bytes;            /* that a host had already, of the checkpoint before */
  uint64_t sent;                    /* checkpoints, to any host */
  even_copy held[EVEN_COPIES_HELD]; /* on disks, a host each; no host: nothing was sent there */
};

void even_copies_renew(even_copies *copies) {
  if (copies != NULL) {
    for (size_t i = 0; i < 2; i++) {
      even_text_free(&copies->kinds[i].newest);
      even_text_free(&copies->kinds[i].order);
      copies->kinds[i] = (copies_of){.memory = false};
    }
    copies->now = NULL;
    copies->opened = false;
  }
}

static void forget(even_copy *copy) {
  even_text_free(&copy->host);
  even_text_free(&copy->folder);
  even_text_free(&copy->order);
  *copy = (even_copy){.host = EVEN_TEXT_EMPTY};
}

void even_copies_close(even_copies *copies) {
  if (copies != NULL) {
    even_copies_renew(copies);
    for (size_t i = 0; i < EVEN_COPIES_HELD; i++) {
      forget(&copies->held[i]);
    }
    even_free(copies);
  }
}

static size_t at_most(const even_hosts *hosts, int wanted) {
  size_t others = even_hosts_count(hosts) - 1; /* a witness, the last, keeps none */
  return (size_t)wanted < others ? (size_t)wanted : others;
}

static bool are_kept(const even_hosts *hosts) {
  return hosts != NULL && (hosts->params.copies > 0 || hosts->params.memory_copies > 0);
}

static even_status open_copies(even_hosts *hosts) {
  if (hosts->copies == NULL) {
    EVEN_TRY(EVEN_NEW(&hosts->copies));
  }
  hosts->copies->kinds[0].most = at_most(hosts, hosts->params.copies);
  hosts->copies->kinds[1].most = at_most(hosts, hosts->params.memory_copies);
  hosts->copies->kinds[1].memory = true;
  hosts->copies->opened = true;
  return EVEN_OK;
}

/* Where checkpoints of this kind are looked for: memory has also those that are newer on the disk. */
static size_t folders_of(const even_job *job, const copies_of *kind, const char *folders[2]) {
  size_t count = 0;
  if (job->params->checkpoint_folder != NULL) {
    folders[count++] = job->params->checkpoint_folder;
  }
  if (kind->memory && job->params->memory != NULL) {
    folders[count++] = even_text_string(&job->params->memory->folder);
  }
  return count;
}

static void add_names(const char *folder, even_text *text) {
  even_names names = {NULL, 0};
  if (even_folder_names(folder, &names) == EVEN_OK) {
    for (size_t i = 0; i < names.count; i++) {
      even_text_format(text, "%s/", names.items[i]);
    }
  }
  even_names_free(&names);
}

/* Reading all manifests takes its time: only where names have come or gone. */
static bool has_changed(const even_job *job, copies_of *kind) {
  const char *folders[2];
  size_t count = folders_of(job, kind, folders);
  even_text text = EVEN_TEXT_EMPTY;
  for (size_t i = 0; i < count; i++) {
    add_names(folders[i], &text);
  }
  uint64_t sum = even_checkpoint_checksum(even_text_string(&text), text.length);
  bool changed = text.length > 0 && sum != kind->names;
  kind->names = sum;
  even_text_free(&text);
  return changed;
}

/* The newest of a folder, where that is the job's own. *order: info.order of it. */
static even_status find_own(const even_job *job, const char *folder, char **path, even_text *order) {
  even_checkpoint_info info;
  EVEN_TRY(even_checkpoint_find_newest(folder, false, path));
  if (*path == NULL) {
    return EVEN_OK;
  }
  even_status status = even_checkpoint_inspect(*path, &info);
  if (status == EVEN_OK && even_job_owns(job, &info)) {
    even_text_add(order, info.order);
    status = even_text_status(order);
  } else {
    even_free(*path);
    *path = NULL;
  }
  even_checkpoint_info_free(&info);
  return status;
}

/* *all: each folder could be read. */
static even_status find_new(const even_job *job, const copies_of *kind, char **path, even_text *newest, bool *all) {
  const char *folders[2];
  size_t count = folders_of(job, kind, folders);
  even_status status = EVEN_OK;
  for (size_t i = 0; i < count; i++) {
    even_text order = EVEN_TEXT_EMPTY;
    char *own = NULL;
    if (find_own(job, folders[i], &own, &order) != EVEN_OK) {
      even_error_clear(); /* it is being removed, perhaps */
      *all = false;
    } else if (own != NULL && strcmp(order.data, even_text_string(newest)) > 0) {
      even_free(*path);
      *path = own;
      own = NULL;
      even_text_clear(newest);
      even_text_add(newest, order.data);
      status = even_text_status(newest);
    }
    even_free(own);
    even_text_free(&order);
  }
  return status;
}

/* Told once, until it goes well again. */
static void tell_failure(even_job *job, const even_host_agent *agent, const even_error *why) {
  copies_of *kind = job->hosts->copies->now;
  if (!kind->failure_told) {
    even_job_notice(job, "host %s has no copy of the newest checkpoint%s: %.300s (the next one is tried anew)",
                    agent->name, kind->memory ? " in its memory" : "", why->what);
  }
  kind->failed = kind->failure_told = true;
}

static void begin(even_job *job, copies_of *kind, const char *path, const even_text *order) {
  even_copies *copies = job->hosts->copies;
  even_text_clear(&kind->order);
  even_text_add(&kind->order, even_text_string(order));
  even_text_clear(&kind->newest);
  even_text_add(&kind->newest, path);
  copies->now = kind;
  kind->news = !kind->told || kind->failed;
  kind->failed = false;
  copies->begun_ns = even_clock_ns();
  for (size_t i = 1; i <= kind->most; i++) {
    even_host_agent *agent = &job->hosts->agents[i];
    if (agent->link != NULL && even_bring_begin(job, agent, path, true, kind->memory) != EVEN_OK) {
      tell_failure(job, agent, even_error_last());
      even_bring_drop(agent);
      even_error_clear();
    }
  }
}

static void tell_copy(even_job *job, const even_host_agent *agent, uint64_t bytes) {
  const even_copies *copies = job->hosts->copies;
  const copies_of *kind = copies->now;
  const char *slash = strrchr(even_text_string(&kind->newest), '/');
  const char *name = slash == NULL ? "it" : slash + 1;
  if (kind->news && even_bring_was_sent(agent)) {
    even_job_notice(job, "host %s has a copy of %s%s, sent in %.1f s (%.1f MB); newer ones follow", agent->name, name,
                    kind->memory ? " in its memory" : "", (double)(even_clock_ns() - copies->begun_ns) / 1e9,
                    (double)bytes / 1e6);
  } else if (kind->news && !even_bring_had_come(agent)) {
    even_job_notice(job, "host %s has %s already: where it sees this folder, there are no copies on it", agent->name,
                    name);
  }
}

/* What memory lacks for its words is not known. */
static bool is_known(const even_copy *copy) {
  bool known = copy->host.length > 0 && even_text_status(&copy->host) == EVEN_OK &&
               even_text_status(&copy->folder) == EVEN_OK && even_text_status(&copy->order) == EVEN_OK;
  even_error_clear();
  return known;
}

/* The host's own, or a free one, or that of the oldest copy, where that is older; NULL: none of these. */
static even_copy *place_for(even_copies *copies, const char *host, const char *order) {
  even_copy *place = NULL;
  for (size_t i = 0; i < EVEN_COPIES_HELD; i++) {
    even_copy *copy = &copies->held[i];
    if (is_known(copy) && strcmp(even_text_string(&copy->host), host) == 0) {
      return copy;
    }
    const char *other = is_known(copy) ? even_text_string(&copy->order) : "";
    if (strcmp(other, place == NULL ? order : is_known(place) ? even_text_string(&place->order) : "") < 0) {
      place = copy;
    }
  }
  return place;
}

static void note_copy(even_copies *copies, const char *host, const char *folder, const char *order) {
  even_copy *held = place_for(copies, host, order);
  if (held != NULL) {
    forget(held);
    even_text_add(&held->host, host);
    even_text_add(&held->folder, folder);
    even_text_add(&held->order, order);
  }
}

static void keep_in_mind(even_copies *copies, const even_host_agent *agent) {
  const char *order = even_text_string(&copies->now->order);
  const char *there = even_path_name(even_text_string(&agent->resume));
  if (copies->now->memory || strcmp(there, even_path_name(even_text_string(&copies->now->newest))) != 0) {
    return; /* or a restart has had another one brought there meanwhile */
  }
  note_copy(copies, agent->name, even_text_string(&agent->resume), order);
}

static bool is_copy(const even_host_agent *agent) {
  return even_bring_was_sent(agent) || even_bring_had_come(agent);
}

/* The one under way may have come there since the last tick: between attempts there is none. */
static void hear_of_last(even_hosts *hosts) {
  const copies_of *kind = hosts->copies->now;
  for (size_t i = 1; kind != NULL && i <= kind->most; i++) {
    if (even_bring_state(&hosts->agents[i], NULL) == EVEN_BRING_HOLDS && is_copy(&hosts->agents[i])) {
      keep_in_mind(hosts->copies, &hosts->agents[i]);
    }
  }
}

/* Of hosts that have the same one, the first of the list. */
const even_copy *even_copies_newest(even_job *job) {
  even_copies *copies = job->hosts == NULL ? NULL : job->hosts->copies;
  const even_copy *newest = NULL;
  if (copies != NULL) {
    hear_of_last(job->hosts);
  }
  for (size_t i = 0; copies != NULL && i < EVEN_COPIES_HELD; i++) {
    const even_copy *copy = &copies->held[i];
    bool newer = newest == NULL || strcmp(even_text_string(&copy->order), even_text_string(&newest->order)) > 0;
    newest = is_known(copy) && newer ? copy : newest;
  }
  return newest;
}

static even_copy *copy_of(const even_job *job, const char *host) {
  even_copies *copies = job->hosts == NULL ? NULL : job->hosts->copies;
  for (size_t i = 0; copies != NULL && i < EVEN_COPIES_HELD; i++) {
    even_copy *copy = &copies->held[i];
    if (is_known(copy) && strcmp(even_text_string(&copy->host), host) == 0) {
      return copy;
    }
  }
  return NULL;
}

const even_copy *even_copies_of(const even_job *job, const char *host) {
  return copy_of(job, host);
}

const even_copy *even_copies_newer(const even_job *job, const char *order) {
  const even_copies *copies = job->hosts == NULL ? NULL : job->hosts->copies;
  for (size_t i = 0; copies != NULL && i < EVEN_COPIES_HELD; i++) {
    if (is_known(&copies->held[i]) && strcmp(even_text_string(&copies->held[i].order), order) > 0) {
      return &copies->held[i];
    }
  }
  return NULL;
}

void even_copies_miss(even_job *job, const char *host) {
  even_copy *copy = copy_of(job, host);
  if (copy != NULL) {
    forget(copy);
  }
}

const char *even_copies_coming(const even_copies *copies) {
  return copies == NULL || copies->now == NULL ? NULL : even_text_string(&copies->now->order);
}

static void take_stock(even_job *job, const even_host_agent *agent) {
  even_copies *copies = job->hosts->copies;
  uint64_t bytes = 0;
  uint64_t spared = 0;
  even_bring_traffic(agent, &bytes, &spared);
  tell_copy(job, agent, bytes);
  copies->now->told = true;
  if (is_copy(agent)) {
    keep_in_mind(copies, agent);
  }
  if (even_bring_was_sent(agent)) {
    copies->sent++;
    copies->sent_bytes += bytes;
    copies->spared_bytes += spared;
  }
}

/* Each host has it, or cannot. */
static void look(even_job *job) {
  copies_of *kind = job->hosts->copies->now;
  for (size_t i = 1; i <= kind->most; i++) {
    if (even_bring_state(&job->hosts->agents[i], NULL) == EVEN_BRING_UNDER_WAY) {
      return;
    }
  }
  for (size_t i = 1; i <= kind->most; i++) {
    const even_host_agent *agent = &job->hosts->agents[i];
    const even_error *why = NULL;
    switch (even_bring_state(agent, &why)) {
      case EVEN_BRING_FAILED:
        tell_failure(job, agent, why);
        break;
      case EVEN_BRING_HOLDS:
        take_stock(job, agent);
        break;
      default:
        break;
    }
  }
  kind->failure_told = kind->failed;
  job->hosts->copies->now = NULL;
  if (!kind->memory && even_succession_bequeath(job) != EVEN_OK) {
    even_error_clear(); /* lack of memory: whoever leads next hears of the next one */
  }
}

/* Begins to send one, where there is a new one. */
static void look_for_new(even_job *job, copies_of *kind) {
  char *path = NULL;
  even_text order = EVEN_TEXT_EMPTY;
  bool anew = kind->anew;
  bool all = true;
  if (kind->most > 0 && (has_changed(job, kind) || anew) && find_new(job, kind, &path, &order, &all) == EVEN_OK) {
    if (path != NULL && (anew || strcmp(path, even_text_string(&kind->newest)) != 0)) {
      kind->anew = false;
      begin(job, kind, path, &order);
    } else if (path == NULL && anew && all) { /* the newest is another job's: nothing to send until names change */
      kind->anew = false;
      even_text_clear(&kind->newest);
    }
  }
  even_free(path);
  even_text_free(&order);
  even_error_clear(); /* what cannot be read now is looked at again when a name comes */
}

/* Another agent of a host, which takes no checkpoint before it has said what runs there. */
static bool any_comes_anew(const even_hosts *hosts) {
  bool any = false;
  for (size_t i = 1; !any && i < hosts->count; i++) {
    any = hosts->agents[i].renewed;
  }
  return any;
}

void even_copies_tick(even_job *job) {
  even_hosts *hosts = job->hosts;
  uint64_t now = even_clock_ns();
  if (!are_kept(hosts) || job->alive == 0) {
    return; /* between attempts what a restart needs is sent */
  }
  if ((hosts->copies == NULL || !hosts->copies->opened) && open_copies(hosts) != EVEN_OK) {
    even_error_clear(); /* again with the next tick */
    return;
  }
  even_copies *copies = hosts->copies;
  if (copies->now != NULL) {
    look(job);
  }
  if (copies->now != NULL || now < copies->next_ns || any_comes_anew(hosts)) {
    return;
  }
  copies->next_ns = now + EACH_NS;
  for (size_t i = 0; i < 2 && copies->now == NULL; i++) { /* in turn, so that neither is waited for for ever */
    copies->turn = 1 - copies->turn;
    look_for_new(job, &copies->kinds[copies->turn]);
  }
}

/* ---- another host leads ---- */

void even_copies_write(const even_job *job, even_json *json) {
  const even_copies *copies = job->hosts == NULL ? NULL : job->hosts->copies;
  even_json_array(json, "copies");
  for (size_t i = 0; copies != NULL && i < EVEN_COPIES_HELD; i++) {
    const even_copy *copy = &copies->held[i];
    if (is_known(copy)) {
      even_json_object(json, NULL);
      even_json_string(json, "host", even_text_string(&copy->host));
      even_json_string(json, "folder", even_text_string(&copy->folder));
      even_json_string(json, "order", even_text_string(&copy->order));
      even_json_object_end(json);
    }
  }
  even_json_array_end(json);
}

even_status even_copies_read(even_job *job, const json_t *list) {
  even_hosts *hosts = job->hosts;
  if (!are_kept(hosts)) {
    return EVEN_OK;
  }
  EVEN_TRY(open_copies(hosts));
  for (size_t i = 0; i < json_array_size(list); i++) {
    const json_t *one = json_array_get(list, i);
    const char *host = even_json_text(one, "host");
    const char *folder = even_json_text(one, "folder");
    const char *order = even_json_text(one, "order");
    if (host[0] != '\0' && folder[0] == '/' && strcmp(host, hosts->agents[0].name) != 0) {
      note_copy(hosts->copies, host, folder, order);
    }
  }
  return EVEN_OK;
}

void even_copies_tell(even_job *job) {
  const even_copies *copies = job->hosts == NULL ? NULL : job->hosts->copies;
  if (copies == NULL || copies->sent == 0) {
    return;
  }
  even_job_notice(
      job, "%llu copies of checkpoints were sent to other hosts: %.1f MB; %.1f MB had not changed, and were not",
      (unsigned long long)copies->sent, (double)copies->sent_bytes / 1e6, (double)copies->spared_bytes / 1e6);
}

/* ---- the agent is killed ---- */

static void leave_text(const even_text *text, char *out, size_t bytes) {
  bool fits = text->length < bytes;
  memcpy(out, fits ? even_text_string(text) : "", fits ? text->length + 1 : 1);
}

/* One without an end is none. */
static even_status take_text(const char *from, size_t bytes, even_text *out) {
  size_t length = strnlen(from, bytes);
  even_text_clear(out);
  even_text_append(out, from, length < bytes ? length : 0);
  return even_text_status(out);
}

static void leave_kind(const copies_of *kind, bool under_way, even_copies_left_kind *out) {
  const even_text nothing = EVEN_TEXT_EMPTY;
  leave_text(under_way || kind->anew ? &nothing : &kind->newest, out->newest, sizeof out->newest);
  out->told = kind->told;
  out->failed = kind->failed;
  out->failure_told = kind->failure_told;
}

static void leave_copy(const even_copy *held, even_copies_left_copy *out) {
  leave_text(&held->host, out->host, sizeof out->host);
  leave_text(&held->folder, out->folder, sizeof out->folder);
  leave_text(&held->order, out->order, sizeof out->order);
}

void even_copies_leave(const even_job *job, even_copies_left *out) {
  const even_copies *copies = job->hosts == NULL ? NULL : job->hosts->copies;
  const even_copies none = {.opened = false};
  const even_copies *its = copies == NULL ? &none : copies;
  for (size_t i = 0; i < 2; i++) {
    leave_kind(&its->kinds[i], its->now == &its->kinds[i], &out->kinds[i]);
  }
  for (size_t i = 0; i < EVEN_COPIES_HELD; i++) {
    leave_copy(&its->held[i], &out->held[i]);
  }
  out->sent = its->sent;
  out->sent_bytes = its->sent_bytes;
  out->spared_bytes = its->spared_bytes;
}

static even_status take_held(even_copy *held, const even_copies_left_copy *from) {
  EVEN_TRY(take_text(from->host, sizeof from->host, &held->host));
  EVEN_TRY(take_text(from->folder, sizeof from->folder, &held->folder));
  return take_text(from->order, sizeof from->order, &held->order);
}

even_status even_copies_take(even_job *job, const even_copies_left *from) {
  even_hosts *hosts = job->hosts;
  if (!are_kept(hosts)) {
    return EVEN_OK;
  }
  EVEN_TRY(open_copies(hosts));
  even_copies *copies = hosts->copies;
  for (size_t i = 0; i < 2; i++) {
    const even_copies_left_kind *left = &from->kinds[i];
    EVEN_TRY(take_text(left->newest, sizeof left->newest, &copies->kinds[i].newest));
    copies->kinds[i].told = left->told;
    copies->kinds[i].failed = left->failed;
    copies->kinds[i].failure_told = left->failure_told;
  }
  copies->sent = from->sent;
  copies->sent_bytes = from->sent_bytes;
  copies->spared_bytes = from->spared_bytes;
  for (size_t i = 0; i < EVEN_COPIES_HELD; i++) {
    EVEN_TRY(take_held(&copies->held[i], &from->held[i]));
  }
  return EVEN_OK;
}

void even_copies_anew(even_host_agent *agent) {
  even_copies *copies = agent->hosts->copies;
  if (copies == NULL) {
    return;
  }
  if (copies->now != NULL) {
    even_bring_drop(agent); /* of that one alone nothing is told then */
  }
  for (size_t i = 0; i < 2; i++) {
    copies->kinds[i].anew = copies->kinds[i].newest.length > 0;
  }
}
