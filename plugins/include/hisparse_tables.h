/* Pointer tables: how an engine's plugins reach state that outlives a step.
 *
 * A table is an INT64 tensor of addresses and sizes in host memory (pinned, so that it is device-accessible too); a
 * plugin reads it on the host when it is enqueued, and a captured graph keeps what it read. The runtime fills it once:
 * pools never move. Meanings and units as in hisparse.h.
 */
#ifndef HISPARSE_TABLES_H
#define HISPARSE_TABLES_H

/* One cache state: what hs_resolve works on. */
enum hs_state_table {
  HS_STATE_PAGE_MAP,
  HS_STATE_HOST_MAP,
  HS_STATE_HOT_TABLE,
  HS_STATE_OWNERS,
  HS_STATE_LRU,
  HS_STATE_COUNTERS,
  HS_STATE_SLOTS,
  HS_STATE_PAGES,
  HS_STATE_HOT_ROWS,
  HS_STATE_HOT_PAGES,
  HS_STATE_SIZE
};

/* One store of payload rows or index keys; the host side is 0 where there is none. */
enum hs_store_table {
  HS_STORE_DEVICE,      /* rows on the device */
  HS_STORE_DEVICE_ROWS, /* how many */
  HS_STORE_HOST,        /* the backup, pinned */
  HS_STORE_HOST_ROWS,
  HS_STORE_COUNTERS,    /* of its cache state, or 0 */
  HS_STORE_SIZE
};

#endif
