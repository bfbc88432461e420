/* Keeps run.db small: when it has many rows of steps, the oldest of them become rows of several steps each. */
#ifndef EVEN_MONITOR_THIN_H
#define EVEN_MONITOR_THIN_H

#include <sqlite3.h>
#include <stdint.h>

enum {
  EVEN_THIN_STEP_ROWS = 1 << 15, /* kept where nobody says otherwise, one a rank and step: half a second to merge */
  EVEN_THIN_ROWS_A_RANK = 256,   /* at least */
  EVEN_THIN_HEAD_STEPS = 64      /* first steps of an attempt that stay as they are: a report leaves some of them out */
};

typedef struct even_thinning {
  int64_t most_rows; /* of steps; INT64_MAX: all are kept */
  int64_t rows;      /* there now */
  int64_t next;      /* so many are too many; 0: most_rows */
  int64_t width;     /* steps that a merged row covers; 0: nothing was merged yet */
  int64_t attempt;   /* merged with that width: older attempts, and this one's steps before `step` */
  int64_t step;
} even_thinning;

/* To be called in an open transaction. Where there are more rows than most_rows, the older half of the steps is
 * merged, with their spans, until an eighth of most_rows is free or nothing more can be: groups of `width` steps
 * (a power of two, which grows), the same for all ranks. A merged row has the last step of its group and the sums of
 * its numbers, of loss and predicted_seconds the means; column "steps" counts. meta "merged_rows" is the highest rowid
 * of steps that was merged. Returns SQLite's code. */
int even_thin(sqlite3 *connection, even_thinning *thinning);

#endif
