/* Waits in several groups that are one another's cause: found by whoever is in such a circle, from what all have told.
 *
 * A process gets on when one of its threads does; a thread in a collective when all whom it waits for have got on, one
 * that receives from any rank when one of them has. Begin with all that are known to wait, and take away, until nothing
 * changes, those that can get on: what is left never will. All of it is true of one moment, a while ago: what is
 * looked at had begun before and stood unchanged after it. */
#include "base/alloc.h"
#include "base/fail.h"
#include "comm/group.h"
#include "comm/waits.h"

#include <stdio.h>
#include <string.h>

#define SHOWN 3 /* of a circle */
#define FIX                                                                                               \
  "all ranks must make their calls in one order, also those of different groups: look for a branch that " \
  "depends on the rank or on the data, or for a receive whose message is sent behind a collective"

typedef struct stuck_wait {
  uint32_t any;
  uint32_t whoms;
  uint64_t whom[EVEN_WAITS_WHOM];
} stuck_wait;

typedef struct stuck_process {
  uint64_t process;
  uint64_t change;
  even_wait_pad *pad;
  bool stuck;
  bool shown;
  uint32_t waits;
  stuck_wait wait[EVEN_WAITS];
} stuck_process;

typedef struct stuck_set {
  stuck_process *of;
  size_t count;
} stuck_set;

static stuck_process *find(const stuck_set *set, uint64_t process) {
  for (size_t i = 0; process != 0 && i < set->count; i++) {
    if (set->of[i].process == process) {
      return &set->of[i];
    }
  }
  return NULL;
}

static bool has_settled(const even_process_words *words, uint64_t now_ns) {
  uint64_t then = now_ns - EVEN_WAITS_SETTLED_NS;
  bool settled =
      words->whole_ns != 0 && words->whole_ns + EVEN_WAITS_SETTLED_NS <= then && words->whole_seen_ns >= then;
  for (uint32_t i = 0; i < words->waits; i++) {
    settled = settled && words->wait[i].seen_ns >= then;
  }
  return settled && words->waits > 0;
}

static void add(stuck_set *set, even_wait_pad *pad, uint64_t now_ns) {
  even_process_words words;
  if (!even_waits_read(pad, &words) || !has_settled(&words, now_ns) || find(set, words.process) != NULL) {
    return;
  }
  stuck_process *one = &set->of[set->count++];
  *one = (stuck_process){
      .process = words.process, .change = words.change, .pad = pad, .stuck = true, .waits = words.waits};
  for (uint32_t i = 0; i < words.waits; i++) {
    one->wait[i] = (stuck_wait){.any = words.wait[i].any, .whoms = words.wait[i].whoms};
    memcpy(one->wait[i].whom, words.wait[i].whom, sizeof one->wait[i].whom);
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

static void collect(stuck_set *set, size_t room, even_comm *groups, uint64_t now_ns) {
  for (even_comm *group = groups; group != NULL; group = group->next_group) {
    for (int rank = 0; rank < group->ranks && set->count < room; rank++) {
      add(set, even_comm_pad_of(group, rank), now_ns);
    }
  }
}

static const stuck_process *stuck_one(const stuck_set *set, uint64_t process) {
  const stuck_process *one = find(set, process);
  return one != NULL && one->stuck ? one : NULL;
}

static bool gets_on(const stuck_set *set, const stuck_wait *wait) {
  uint32_t stuck = 0;
  for (uint32_t i = 0; i < wait->whoms; i++) {
    stuck += stuck_one(set, wait->whom[i]) != NULL;
  }
  return wait->any != 0 ? stuck < wait->whoms || stuck == 0 : stuck == 0;
}

static void take_away(stuck_set *set) {
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t i = 0; i < set->count; i++) {
      stuck_process *one = &set->of[i];
      for (uint32_t wait = 0; wait < one->waits && one->stuck; wait++) {
        one->stuck = !gets_on(set, &one->wait[wait]);
        changed = changed || !one->stuck;
      }
    }
  }
}

static stuck_process *next_of(const stuck_set *set, const stuck_process *one) {
  for (uint32_t i = 0; i < one->wait[0].whoms; i++) {
    if (stuck_one(set, one->wait[0].whom[i]) != NULL) {
      return find(set, one->wait[0].whom[i]);
    }
  }
  return NULL;
}

/* Whether all of the circle is still as it was. */
static bool describe(const stuck_set *set, stuck_process *first, uint64_t now_ns, even_error *why) {
  size_t length = 0;
  int members = 0;
  *why = (even_error){.status = EVEN_ERR_MISMATCH, .rank = -1};
  for (stuck_process *one = first; one != NULL && !one->shown; one = next_of(set, one)) {
    even_process_words words;
    char text[512];
    if (!even_waits_read(one->pad, &words) || words.process != one->process || words.change != one->change ||
        words.waits == 0) {
      return false;
    }
    one->shown = true;
    if (++members > SHOWN) {
      continue;
    }
    even_waits_describe_wait(&words.wait[0], words.rank, 80, now_ns, text, sizeof text);
    (void)snprintf(why->what + length, sizeof why->what - length, "%s%s",
                   members == 1 ? "ranks wait for one another: " : ", ", text);
    length = strlen(why->what);
  }
  if (members > SHOWN) {
    (void)snprintf(why->what + length, sizeof why->what - length, ", and %d more", members - SHOWN);
  }
  (void)snprintf(why->fix, sizeof why->fix, "%s", FIX);
  return true;
}

static void leave_word(const stuck_set *set, even_wait_pad *pad, const even_error *why) {
  const stuck_process *one = find(set, atomic_load(&pad->process));
  if (one == NULL || !one->shown || atomic_exchange(&pad->held, 1u) != 0) {
    return;
  }
  if (pad->found_process != one->process || atomic_load(&pad->found_change) < one->change) {
    pad->found_process = one->process;
    even_comm_end_words_write(&pad->found, why);
    atomic_store(&pad->found_change, one->change);
  }
  atomic_store(&pad->held, 0);
}

void even_waits_look_for_circle(even_comm *groups, const even_process_words *own, uint64_t now_ns) {
  const even_error kept = *even_error_last();
  even_error why;
  stuck_set set = {0};
  size_t told = count_told(groups);
  if (!has_settled(own, now_ns) || EVEN_NEW_ARRAY(&set.of, told) != EVEN_OK) {
    (void)even_error_restore(&kept); /* without memory: another time */
    return;
  }
  collect(&set, told, groups, now_ns);
  take_away(&set);
  stuck_process *first = find(&set, own->process);
  if (first != NULL && first->stuck && describe(&set, first, now_ns, &why)) {
    for (even_comm *group = groups; group != NULL; group = group->next_group) {
      for (int rank = 0; rank < group->ranks; rank++) {
        leave_word(&set, even_comm_pad_of(group, rank), &why);
      }
    }
  }
  even_free(set.of);
  (void)even_error_restore(&kept);
}
