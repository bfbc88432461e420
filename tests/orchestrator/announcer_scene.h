/* An announcer in a loop that a test turns, and a metadata service that it plays. Time passes by clocks that are ahead,
 * not by waiting. */
#ifndef EVEN_TESTS_ORCHESTRATOR_ANNOUNCER_SCENE_H
#define EVEN_TESTS_ORCHESTRATOR_ANNOUNCER_SCENE_H

#include "metadata_service.h"
#include "orchestrator/announcer.h"

enum { ANNOUNCER_SCENE_TURNS = 20000 }; /* at most, of a millisecond or more each */

typedef struct announcer_scene {
  metadata_service service;
  even_loop loop;
  even_announcer *announcer;
  char place[128];
  char told[2048];
  int tellings;
  int ended;     /* commands */
  pid_t session; /* of one that runs, as it was told; 0: none */
  double seconds;
  char what[EVEN_ANNOUNCEMENT_WORDS * 2];
} announcer_scene;

/* Setup and teardown of a test. */
int announcer_scene_open(void **state);
int announcer_scene_close(void **state);
/* `service`: "aws"; it is asked where the test plays it. */
even_status announcer_scene_ask(announcer_scene *at, const char *service);
even_status announcer_scene_ask_place(announcer_scene *at, const char *place);
/* Tells it of children that have ended. */
void announcer_scene_reap(announcer_scene *at);
/* Whether the end is announced. */
bool announcer_scene_turn(announcer_scene *at);
/* The same within many turns. */
bool announcer_scene_is_due(announcer_scene *at);
/* Where it was asked well, waits for the end; closes the announcer in any case. */
even_status announcer_scene_finish(announcer_scene *at, even_status asked);
/* Until so much was told, or so many commands have ended; none of the turns finds an end. */
void announcer_scene_until_told(announcer_scene *at, int tellings);
void announcer_scene_until_ended(announcer_scene *at, int commands);

#endif
