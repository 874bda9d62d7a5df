//! Tables of shuffles: a row for each mask of eight lanes.

/// Source lane of each lane when the selected lanes move to the front, in their order. 0 for the lanes behind them.
pub(super) static COMPRESS: [[u8; 8]; 256] = {
    let mut table = [[0; 8]; 256];
    let mut mask = 0;
    while mask < 256 {
        let mut lane = 0;
        let mut to = 0;
        while lane < 8 {
            if mask >> lane & 1 == 1 {
                table[mask][to] = lane as u8;
                to += 1;
            }
            lane += 1;
        }
        mask += 1;
    }
    table
};

/// Source lane of each selected lane when the front lanes spread out; 128 for lanes that stay.
pub(super) static EXPAND: [[u8; 8]; 256] = {
    let mut table = [[128; 8]; 256];
    let mut mask = 0;
    while mask < 256 {
        let mut lane = 0;
        let mut from = 0;
        while lane < 8 {
            if mask >> lane & 1 == 1 {
                table[mask][lane] = from;
                from += 1;
            }
            lane += 1;
        }
        mask += 1;
    }
    table
};
