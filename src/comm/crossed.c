/* Waits in several groups that are one another's cause: found by whoever is in such a circle, from what all have told.
 *
 * Whose waits are read in memory that a host's ranks share, by them it is known what holds at one moment, a while ago:
 * what is looked at had begun before and stood unchanged after it. What other hosts' ranks have told holds of the
 * changes that it names (circle.h), whenever it was told and however long it was on its way. */
#include "base/alloc.h"
#include "base/fail.h"
#include "comm/group.h"
#include "comm/waits.h"
#include "os/clock.h"
#include "os/host.h"

#include <stdio.h>
#include <string.h>

#define SHOWN 3 /* of a circle */
#define SITE_SHOWN 80
#define FIX                                                                                               \
  "all ranks must make their calls in one order, also those of different groups: look for a branch that " \
  "depends on the rank or on the data, or for a receive whose message is sent behind a collective"

/* Where the words of a process are. */
typedef struct source {
  const even_process_words *own;
  even_wait_pad *pad;
  const even_far_waits *far;
} source;

typedef struct known {
  even_circle_process *of; /* first this process itself, then the others of its host, then those of other hosts */
  source *from;
  size_t near;
  size_t count;
  size_t room;
} known;

static bool has_settled(const even_process_words *words, uint64_t now_ns) {
  uint64_t then = now_ns - EVEN_WAITS_SETTLED_NS;
  bool settled =
      words->whole_ns != 0 && words->whole_ns + EVEN_WAITS_SETTLED_NS <= then && words->whole_seen_ns >= then;
  for (uint32_t i = 0; i < words->waits; i++) {
    settled = settled && words->wait[i].seen_ns >= then;
  }
  return settled && words->waits > 0 && words->process != 0 && words->change != 0;
}

/* ---- collecting ---- */

static int find_near(const known *all, uint64_t process) {
  for (size_t i = 0; process != 0 && i < all->near; i++) {
    if (all->of[i].process == process) {
      return (int)i;
    }
  }
  return -1;
}

static void add_near(known *all, const even_process_words *words, const source *from, uint64_t now_ns) {
  if (all->count == all->room || !has_settled(words, now_ns) || find_near(all, words->process) >= 0) {
    return;
  }
  even_circle_process *one = &all->of[all->count];
  *one = (even_circle_process){.process = words->process, .change = words->change, .waits = words->waits};
  for (uint32_t i = 0; i < words->waits; i++) {
    one->wait[i] = words->wait[i].needs;
  }
  all->from[all->count] = *from;
  all->near = ++all->count;
}

static void add_pads(known *all, even_comm *groups, uint64_t own, uint64_t now_ns) {
  for (even_comm *group = groups; group != NULL; group = group->next_group) {
    for (int rank = 0; rank < group->ranks; rank++) {
      even_process_words words;
      const source from = {.pad = even_comm_pad_of(group, rank)};
      if (even_waits_read(from.pad, &words) && words.process != own) {
        add_near(all, &words, &from, now_ns);
      }
    }
  }
}

/* All near ones stood at one moment: whom they wait for in memory stood at the change that is known of it. */
static void name_changes(known *all) {
  for (size_t i = 0; i < all->near; i++) {
    for (uint32_t number = 0; number < all->of[i].waits; number++) {
      even_circle_wait *wait = &all->of[i].wait[number];
      for (uint32_t whom = 0; whom < wait->whoms; whom++) {
        int one = wait->at[whom] == 0 ? find_near(all, wait->whom[whom]) : -1;
        if (one >= 0) {
          wait->at[whom] = all->of[one].change;
        }
      }
    }
  }
}

static void add_far(known *all, const even_far_known *far) {
  for (size_t i = 0; far != NULL && i < far->count && all->count < all->room; i++) {
    const even_far_waits *words = &far->of[i];
    if (words->change != 0 && even_circle_find(all->of, all->count, words->process, words->change) < 0) {
      even_circle_process *one = &all->of[all->count];
      *one = (even_circle_process){.process = words->process, .change = words->change, .waits = words->waits};
      memcpy(one->wait, words->wait, sizeof one->wait);
      all->from[all->count++] = (source){.far = words};
    }
  }
}

static size_t count_told(even_comm *groups) {
  size_t told = 0;
  for (even_comm *group = groups; group != NULL; group = group->next_group) {
    for (int rank = 0; rank < group->ranks; rank++) {
      told += atomic_load(&even_comm_pad_of(group, rank)->version) != 0;
    }
  }
  return told;
}

static void let_go(known *all) {
  even_free(all->of);
  even_free(all->from);
}

/* False where this process's own waits have not settled, and without memory: another time. Else `let_go` follows. */
static bool collect(known *all, even_comm *groups, const even_process_words *own, const even_far_known *far,
                    uint64_t now_ns) {
  const source itself = {.own = own};
  if (!has_settled(own, now_ns)) {
    return false;
  }
  *all = (known){.room = 1 + count_told(groups) + (far == NULL ? 0 : far->count)};
  if (EVEN_NEW_ARRAY(&all->of, all->room) != EVEN_OK || EVEN_NEW_ARRAY(&all->from, all->room) != EVEN_OK) {
    let_go(all);
    return false;
  }
  add_near(all, own, &itself, now_ns);
  add_pads(all, groups, own->process, now_ns);
  name_changes(all);
  add_far(all, far);
  return true;
}

/* ---- words ---- */

static void name_host(char *text, size_t bytes) {
  even_host_names names;
  bool told = even_host_names_read(&names) == EVEN_OK;
  (void)snprintf(text, bytes, "%.*s", (int)bytes - 1, told ? names.host : "");
}

/* As it would be told to another host, but for whom it waits for, which is known already; whether it is as it was. */
static bool tell_words(const known *all, size_t one, uint64_t now_ns, even_far_waits *out) {
  const source *from = &all->from[one];
  const even_circle_process *is = &all->of[one];
  even_process_words words;
  if (from->far != NULL) {
    *out = *from->far;
    out->waited_ns = now_ns > out->waited_ns ? now_ns - out->waited_ns : 0;
    return true;
  }
  const even_process_words *read = from->own;
  if (from->pad != NULL) {
    if (!even_waits_read(from->pad, &words)) {
      return false;
    }
    read = &words;
  }
  if (read->process != is->process || read->change != is->change || read->waits == 0) {
    return false;
  }
  const even_wait_words *first = &read->wait[0];
  *out = (even_far_waits){.process = is->process, .change = is->change, .rank = read->rank, .waits = is->waits};
  out->version = read->whole_seen_ns;
  out->waited_ns = now_ns > first->since_ns ? now_ns - first->since_ns : 0;
  memcpy(out->wait, is->wait, sizeof out->wait);
  (void)snprintf(out->doing, sizeof out->doing, "%s", first->doing);
  (void)snprintf(out->group, sizeof out->group, "%s", first->group);
  (void)snprintf(out->site, sizeof out->site, "%s", first->site);
  name_host(out->host, sizeof out->host);
  return true;
}

static void describe_one(const even_far_waits *of, bool with_host, uint64_t now_ns, char *text, size_t bytes) {
  even_wait_words wait = {.since_ns = now_ns - of->waited_ns};
  (void)snprintf(wait.doing, sizeof wait.doing, "%s", of->doing);
  (void)snprintf(wait.group, sizeof wait.group, "%s", of->group);
  (void)snprintf(wait.site, sizeof wait.site, "%s", of->site);
  even_waits_describe_wait(&wait, of->rank, with_host ? of->host : NULL, SITE_SHOWN, now_ns, text, bytes);
}

/* ---- a circle ---- */

/* From this process on, which is stuck; whether it reaches other hosts. */
static bool mark_circle(known *all, even_circle_members *members) {
  bool far = false;
  for (int one = 0; one >= 0 && !all->of[one].shown; one = even_circle_next(all->of, all->count, (size_t)one)) {
    all->of[one].shown = true;
    far = far || all->from[one].far != NULL;
    even_circle_add(members, all->of[one].process, all->of[one].change);
  }
  return far;
}

/* Whether all of the circle is still as it was. */
static bool describe(const known *all, const even_circle_members *members, bool far, uint64_t now_ns, even_error *why) {
  size_t length = 0;
  size_t total = 0;
  *why = (even_error){.status = EVEN_ERR_MISMATCH, .rank = -1};
  for (size_t i = 0; i < all->count; i++) {
    total += all->of[i].shown;
  }
  for (uint32_t member = 0; member < members->count; member++) {
    int one = even_circle_find(all->of, all->count, members->process[member], members->change[member]);
    even_far_waits words;
    char text[EVEN_WAITS_TEXT + EVEN_WAITS_HOST_BYTES];
    if (one < 0 || !tell_words(all, (size_t)one, now_ns, &words)) {
      return false;
    }
    if (member < SHOWN) {
      describe_one(&words, far, now_ns, text, sizeof text);
      (void)snprintf(why->what + length, sizeof why->what - length, "%s%s",
                     member == 0 ? "ranks wait for one another: " : ", ", text);
      length = strlen(why->what);
    }
  }
  if (total > SHOWN) {
    (void)snprintf(why->what + length, sizeof why->what - length, ", and %zu more", total - SHOWN);
  }
  (void)snprintf(why->fix, sizeof why->fix, "%s", FIX);
  return true;
}

bool even_waits_look_for_circle(even_comm *groups, const even_process_words *own, const even_far_known *far,
                                uint64_t now_ns, even_circle_found *found) {
  const even_error kept = *even_error_last();
  known all;
  bool is = false;
  memset(found, 0, sizeof *found);
  if (collect(&all, groups, own, far, now_ns)) {
    even_circle_search(all.of, all.count);
    if (all.of[0].stuck) {
      bool reaches = mark_circle(&all, &found->members);
      is = describe(&all, &found->members, reaches, now_ns, &found->why);
    }
    for (size_t i = 0; i < all.near && is; i++) {
      if (all.of[i].shown && all.from[i].pad != NULL) {
        even_waits_write_found(all.from[i].pad, all.of[i].process, all.of[i].change, found);
      }
    }
    if (is) { /* wherever else they may look */
      even_waits_pass_on(groups, found);
    }
    let_go(&all);
  }
  (void)even_error_restore(&kept);
  return is;
}

void even_waits_pass_on(even_comm *groups, const even_circle_found *found) {
  for (even_comm *group = groups; group != NULL; group = group->next_group) {
    for (int rank = 0; rank < group->ranks; rank++) {
      even_wait_pad *pad = even_comm_pad_of(group, rank);
      uint64_t process = atomic_load(&pad->process);
      uint64_t change = 0;
      if (rank != group->rank && process != 0 && even_circle_has(&found->members, process, &change)) {
        even_waits_write_found(pad, process, change, found);
      }
    }
  }
}

/* ---- of and for another host's ranks ---- */

void even_waits_keep(even_far_known *far, uint64_t own, const even_far_waits *words, uint64_t now_ns) {
  size_t at = far->next;
  even_far_waits kept = *words;
  kept.waits = kept.waits < EVEN_WAITS ? kept.waits : EVEN_WAITS;
  for (uint32_t i = 0; i < kept.waits; i++) {
    even_circle_bound_wait(&kept.wait[i]);
  }
  kept.doing[sizeof kept.doing - 1] = kept.group[sizeof kept.group - 1] = '\0';
  kept.host[sizeof kept.host - 1] = kept.site[sizeof kept.site - 1] = '\0';
  kept.waited_ns = now_ns > kept.waited_ns ? now_ns - kept.waited_ns : 0; /* since when */
  for (size_t i = 0; i < far->count; i++) {
    at = far->of[i].process == kept.process ? i : at;
  }
  const even_far_waits *old = &far->of[at];
  bool later = at == far->count || old->process != kept.process || old->change < kept.change ||
               (old->change == kept.change && old->version <= kept.version); /* others pass on older ones */
  if (kept.process != 0 && kept.process != own && kept.change != 0 && later) {
    far->count = at == far->count ? far->count + 1 : far->count;
    far->next = at == far->next ? (far->next + 1) % EVEN_FAR_KNOWN : far->next;
    far->of[at] = kept;
  }
}

/* `shown`: of those that are in `order` already, which has room for all. */
static size_t order_by_need(known *all, size_t *order) {
  size_t count = 1;
  order[0] = 0;
  all->of[0].shown = true;
  for (size_t next = 0; next < count; next++) {
    const even_circle_process *one = &all->of[order[next]];
    for (uint32_t number = 0; number < one->waits; number++) {
      for (uint32_t whom = 0; whom < one->wait[number].whoms; whom++) {
        int found = even_circle_find(all->of, all->count, one->wait[number].whom[whom], one->wait[number].at[whom]);
        if (found >= 0 && !all->of[found].shown) {
          all->of[found].shown = true;
          order[count++] = (size_t)found;
        }
      }
    }
  }
  return count;
}

/* Itself, then the others that an answer has room for at that turn. */
static size_t tell_in_turn(known *all, size_t *order, uint64_t now_ns, uint64_t turn, even_far_waits *out) {
  const size_t page = EVEN_FAR_WAITS - 1;
  size_t count = order_by_need(all, order);
  size_t pages = (count - 1 + page - 1) / page;
  size_t first = 1 + (pages == 0 ? 0 : (size_t)(turn % pages) * page);
  size_t told = tell_words(all, 0, now_ns, &out[0]);
  for (size_t i = first; told > 0 && i < count && i < first + page; i++) {
    told += tell_words(all, order[i], now_ns, &out[told]);
  }
  return told;
}

size_t even_waits_gather(even_comm *groups, const even_process_words *own, const even_far_known *far, uint64_t now_ns,
                         uint64_t turn, even_far_waits *out) {
  const even_error kept = *even_error_last();
  known all;
  size_t *order = NULL;
  size_t told = 0;
  if (collect(&all, groups, own, far, now_ns)) {
    if (EVEN_NEW_ARRAY(&order, all.count) == EVEN_OK) {
      told = tell_in_turn(&all, order, now_ns, turn, out);
    }
    even_free(order);
    let_go(&all);
  }
  (void)even_error_restore(&kept);
  return told;
}
