/* A leader that lacks its checkpoints, or has older ones, and two hosts that keep some, joined by real links over
 * loopback. Each host's disk is a folder of its own. */
#ifndef EVEN_TESTS_BRING_SCENE_H
#define EVEN_TESTS_BRING_SCENE_H

#include "orchestrator/bring_back.h"
#include "orchestrator/bring_give.h"
#include "orchestrator/parcel_star.h"

enum { BRING_SCENE_NOTICES = 4096 };

#define JOB "00000000000000000000000000000001"
#define OTHER_JOB "00000000000000000000000000000002"
#define LINEAGE "0000000000000000000000000000000a"
#define OTHER_LINEAGE "0000000000000000000000000000000b"

typedef struct bring_side { /* of a host */
  even_bring_kept kept;
  even_bring_give *give;
  char disk[160];
  bool deaf;        /* what the leader asks does not reach it */
  even_text estate; /* what the leader has left it last */
} bring_side;

typedef struct bring_scene {
  star star;
  bring_side sides[STAR_HOSTS];
  even_hosts hosts;
  even_host_agent agents[STAR_HOSTS];
  even_agent_params params;
  even_job job;
  char folder[160]; /* the leader's */
  char notices[BRING_SCENE_NOTICES];
  char after[64];
  uint64_t moved;
  int still;
  int dies_after;  /* host 2, when so many pieces have come to the leader; 0: it does not */
  int alters_from; /* from that piece on, one is changed on its way */
  bool stops;
  struct even_voter *voter; /* from that piece on the leader has it: another one leads by now; NULL: it has none */
  int superseded_from;
} bring_scene;

/* The one that there is. */
extern bring_scene at;

int bring_scene_set_up(void **state);
int bring_scene_tear_down(void **state);
/* Ends what there is, and begins anew: what lies on the disks stays. */
void bring_scene_begin_anew(void);
/* "step-N" in that folder, of order [1, 0, N]; of JOB and LINEAGE, or of others. */
void bring_scene_save(const char *folder, int step);
void bring_scene_save_of(const char *folder, int step, const char *job, const char *lineage);
void bring_scene_read_order(const char *folder, int step, char out[64]);
/* For what JOB has written, newer than at.after. */
even_bring_back_wish bring_scene_wish(void);
/* Looks for the newest; what it says is whole, and lies where it says. */
even_status bring_scene_look(const even_bring_back_wish *wish, char **path);
/* It comes to that place; NULL: none does. */
void bring_scene_assert_brings(const even_bring_back_wish *wish, const char *place);
/* Whether the user was told these words. */
bool bring_scene_was_told(const char *words);

#endif
